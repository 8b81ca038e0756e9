"""torchrun --nnodes=1:2: when a machine dies, the other machine continues alone.

Each sample is used exactly once per epoch.
"""

import json
import time
from pathlib import Path

import pytest
import torch
from cluster import elastic_training
from cluster.elastic_training import EPOCHS, SAMPLES, SEED
from cluster.machines import ADDRESSES

pytestmark = pytest.mark.slow

COMMAND = (
    "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id elastic "
    "--rdzv-conf last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={first},timeout=100 "
    f"--rdzv-endpoint {ADDRESSES['n1']}:29400 {elastic_training.__file__} {{folder}} 0.3"
)


def lines(folder):
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(folder, step, *runs):
    end = time.monotonic() + 120
    while not any(line.get("step") == step and line["world"] == 2 for line in lines(folder)):
        assert all(run.process.poll() is None for run in runs), "\n".join(run.output for run in runs)
        assert time.monotonic() < end, "\n".join(run.output for run in runs)
        time.sleep(0.1)


def interleaved(ranks):
    """Return the indices of one step in the order of the sampler, given {rank: indices}."""
    return [
        index for column in zip(*(ranks[rank] for rank in sorted(ranks)), strict=True) for index in column
    ]


def used(recorded, done):
    """Return {epoch: samples} for the first `done` steps with two processes and all steps with one process."""
    steps = {}
    for line in recorded:
        if "step" in line and (line["world"] == 1 or line["step"] <= done):
            key = (2 - line["world"], line["epoch"], line["step"])
            steps.setdefault(key, {})[line["rank"]] = line["indices"]
    order = {}
    for (_, epoch, _), ranks in sorted(steps.items()):
        order.setdefault(epoch, []).extend(interleaved(ranks))
    return order


def test_run_continues_and_loses_no_sample_when_a_machine_dies(machines, folder):
    one, two = (COMMAND.format(folder=folder, first=first) for first in ("true", "false"))
    with machines["n1"].running(one, folder) as first, machines["n2"].running(two, folder) as second:
        wait_for_step(folder, 3, first, second)
        machines["n2"].run("kill -9 -1 || true", folder)  # kill every process on the machine except PID 1
        first.wait(150).succeeded()
    recorded = lines(folder)
    starts = [line for line in recorded if "start" in line and line["world"] == 1]
    assert len(starts) == 1, recorded
    # A single process runs two steps for each step of two processes.
    done, rest = divmod(starts[0]["start"], 2)
    assert rest == 0
    assert done >= 2, "the run repeated steps from before the last checkpoint"
    orders = used(recorded, done)
    assert sorted(orders) == list(range(EPOCHS))
    for epoch, order in orders.items():
        generator = torch.Generator().manual_seed(SEED + epoch)
        assert order == torch.randperm(SAMPLES, generator=generator).tolist()
    last = max((folder / "run").glob("iter_*.pth"), key=lambda path: Path(path).stat().st_mtime)
    meta = torch.load(last, weights_only=True)["meta"]
    assert (meta["epoch"], meta["iter"]) == (EPOCHS - 1, EPOCHS * SAMPLES // elastic_training.BATCH_SIZE)
