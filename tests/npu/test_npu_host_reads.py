"""Test that the host does not wait for an NPU during a training step, except to log or to verify new graphs."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "matrix"))

from matrix_nets import make
from matrix_options import OF_SEVERAL, OPTIONS, possible, refusal
from matrix_runs import Backend, Task, _config

from slipstream.hooks import Hook
from slipstream.runner import Runner

torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)
OTHERS = {
    "auto": "auto",
    "nan_guard=skip": dict(nan_guard="skip", fused=True),
    "prefetch": dict(prefetch=2),
    "offload": dict(activation_checkpointing=dict(modules=["Block"], offload=True)),
    "gc": dict(gc=5),
    "tf32": dict(precision="tf32"),
}
NAMES = [*(option for option in OPTIONS if option not in {*OF_SEVERAL, "compile=step", "resume"}), *OTHERS]
FIRST = 8
"""All graphs are verified before this step."""


class Steps(Hook):
    """Records the operations that make the host wait in each step, excluding those of the hooks."""

    priority = "LOWEST"

    def __init__(self):
        self.seen = []

    def before_train(self, runner):
        self.step = step = runner.step

        def watched(batch):
            with torch_npu.watching((*torch_npu.HOST_READS, "host_to_device_blocking")) as seen:
                logs = step(batch)
            self.seen.append(seen)
            return logs

        runner.step = watched


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("option", NAMES)
def test_step_does_not_wait_for_the_device(option, compiled, tmp_path):
    net = ("conv", "transformer")[(NAMES.index(option) + compiled) % 2]
    options = ["compile=step"] if compiled else []
    if option in OPTIONS:
        options.append(option)
    if (
        not possible(options, 1, net)
        or refusal(options, net)
        or (compiled and (option == "auto" or option == "compile=model"))
    ):
        pytest.skip("excluded combination")
    if {"SAM", "offload"} & {option} and compiled:
        pytest.skip("the step cannot be compiled as one graph")
    torch._dynamo.reset()
    config = _config(net, options, tmp_path, 1, Backend(net))
    if option in OTHERS:
        config["speed"] = OTHERS[option] if option == "auto" else config["speed"] | OTHERS[option]
    hook = Steps()
    runner = Runner(Task(make(net)), custom_hooks=[hook], **config)
    runner.train()
    assert len(hook.seen) == 20
    assert getattr(hook.step, "uses_graph", False) == compiled
    assert not any(hook.seen[FIRST:]), hook.seen[FIRST:]
