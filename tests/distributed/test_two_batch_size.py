"""The batch-size finder in two processes: the ranks try the same sizes together and return the same result."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from two_processes import run_in_two

import tiny_runs
from slipstream.dist import all_reduce, get_rank, init_dist
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.process_tree import descendants
from slipstream.tune import find_batch_size, rank_process
from slipstream.tune.api import config_job
from slipstream.tune.batch_size import search_batch_sizes
from slipstream.tune.process import TrialError


class FullOnOne(nn.Module):
    """A model whose backward pass runs out of memory on rank 1, after the gradients of the last layer are ready."""

    def __init__(self, limit):
        super().__init__()
        self.first, self.last, self.limit = nn.Linear(4, 8), nn.Linear(8, 3), limit

    def forward(self, inputs):
        hidden = self.first(inputs)
        if get_rank() == 1 and len(inputs) > self.limit and hidden.requires_grad:
            hidden.register_hook(run_out_of_memory)
        return self.last(hidden)


def run_out_of_memory(grad):
    raise torch.OutOfMemoryError("simulated")


def own_objects(model=None):
    torch.manual_seed(get_rank())
    model = model or FullOnOne(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*tiny_runs.samples()), batch_size=8, shuffle=True)
    inputs, targets = next(iter(loader))
    cross_entropy(model.last(model.first(inputs)), targets).backward()
    optimizer.step()
    return model, loader, optimizer, cross_entropy


def state(model, optimizer):
    grads = [param.grad for param in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), grads, torch.get_rng_state()])


def out_of_memory_on_one_rank(folder):
    init_dist("pytorch", timeout=30)
    model, loader, optimizer, loss = own_objects()
    before, rows, start = state(model, optimizer), [], time.monotonic()
    found = find_batch_size(model, loader, optimizer, loss, max_size=4, budget=300, report=rows.append)
    seconds = time.monotonic() - start
    torch.testing.assert_close(before, state(model, optimizer), rtol=0, atol=0)
    total = torch.ones(1)
    all_reduce(total)  # the group of the calling processes still works
    trials = [pid for pid in descendants(os.getpid()) if b"spawn_main" in command(pid)]
    return found, rows == found.rows, seconds, total.item(), trials


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def of_a_configuration(folder):
    cfg = tiny_runs.training(folder / str(get_rank()))
    return search_batch_sizes(config_job(cfg), 2, 300, lambda row: None)


class Scripted:
    """A mock of `Process`.

    `script` is the error that starting this rank's trial raises, or a sequence of messages and errors, after which the
    trial hangs.
    """

    script = ({}, {})
    living = 0

    def __init__(self, job, make_observer):
        if isinstance(self.script, Exception):
            raise self.script
        self.messages = list(self.script)
        Scripted.living += 1

    def request(self, steps, untimed):
        pass

    def poll(self, event, seconds):
        if not self.messages:
            time.sleep(seconds)
            return None
        if isinstance(self.messages[0], Exception):
            raise self.messages[0]
        return self.messages.pop(0)

    def timeout(self, event, seconds):
        return TrialError("timed out", "late")

    def end(self):
        Scripted.living -= 1


def scripted(*scripts, budget=60, max_size=1):
    """Search with one script per rank, and return the result or the error."""
    rank_process.Process, Scripted.script = Scripted, scripts[get_rank()]
    found = error_of(lambda: search_batch_sizes(lambda setting: None, max_size, budget, lambda row: None))
    assert Scripted.living == 0
    return found


WARM = dict(accumulate=1, buffered=0)
OUT = TrialError("out of memory", "full")
BROKEN = TrialError("failed", "broken")


def simulated_trials(folder):
    times = [dict(seconds=seconds, peak_mib=mib) for seconds, mib in ((0.1, 7.0), (0.4, 5.0))]
    return dict(
        slowest=scripted((WARM, times[0]), (WARM, times[1])),
        memory=scripted((), (OUT,)),
        cause=scripted((BROKEN,), (OUT,)),
        measured=scripted((WARM, times[0]), (WARM, BROKEN)),
        timeout=scripted((WARM, times[0]), (), budget=1),
        start=scripted((WARM, times[0]), ConfigError("no pickle")),
    )


def error_of(call):
    try:
        return call()
    except SlipstreamError as error:
        return f"{type(error).__name__}: {error}"


def wrong_arguments(folder):
    model, loader, optimizer, loss = own_objects()
    wrapped = nn.parallel.DistributedDataParallel(model)
    calls = dict(
        limit=lambda: find_batch_size(model, loader, optimizer, loss, max_size=2 + get_rank()),
        budget=lambda: find_batch_size(model, loader, optimizer, loss, budget=60 + get_rank()),
        model=lambda: find_batch_size("model" if get_rank() else model, loader, optimizer, loss),
        wrapped=lambda: find_batch_size(wrapped, loader, optimizer, loss),
        local=lambda: find_batch_size(model, loader, optimizer, lambda outputs, targets: outputs.sum()),
        small=lambda: find_batch_size(model, loader, optimizer, loss, max_size=0),
    )
    errors = {name: error_of(call) for name, call in calls.items()}
    address = os.environ.pop("MASTER_ADDR")
    errors["environment"] = error_of(lambda: find_batch_size(model, loader, optimizer, loss))
    os.environ["MASTER_ADDR"] = address
    return errors


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    functions = [start, wrong_arguments, simulated_trials]
    return run_in_two(functions, tmp_path_factory.mktemp("sizes"))


def start(folder):
    init_dist("pytorch", timeout=30)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    functions = [out_of_memory_on_one_rank, of_a_configuration]
    return run_in_two(functions, tmp_path_factory.mktemp("real"), timeout=300)


def test_the_time_of_a_size_is_that_of_the_slowest_rank(quick):
    first, second = (answer["slowest"] for answer in quick["simulated_trials"])
    assert first == second
    assert [(row.samples_per_second, row.peak_mib) for row in first.rows] == [(2 / 0.4, 7.0)]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("memory", "out of memory: rank 1: full"),
        ("cause", "out of memory: rank 1: full"),
        ("measured", "failed: rank 1: broken"),
    ],
)
def test_a_failure_on_one_rank_ends_the_trial_on_all_ranks(quick, case, reason):
    for answer in quick["simulated_trials"]:
        assert answer[case].endswith(f"(batch size 1: {reason}); fix the cause")


def test_a_trial_that_hangs_on_one_rank_ends_with_the_budget_on_all_ranks(quick):
    for answer in quick["simulated_trials"]:
        assert answer["timeout"].startswith(
            "ConfigError: budget: 1 s is too short: training with batch size 1"
        )


def test_a_trial_that_cannot_start_on_one_rank_raises_an_error_on_all_ranks(quick):
    first, second = (answer["start"] for answer in quick["simulated_trials"])
    assert first == "DistributedError: rank 1 failed (ConfigError: no pickle); fix the error on that rank"
    assert second == "ConfigError: no pickle"


def test_wrong_arguments_raise_errors_on_all_ranks(quick):
    first, second = quick["wrong_arguments"]
    same = "must be the same on all ranks, but it is"
    expected = dict(
        limit=f"ConfigError: max_size: {same} 2 on rank 0 and 3 on rank 1",
        budget=f"ConfigError: budget: {same} 60.0 on rank 0 and 61.0 on rank 1",
        wrapped="ConfigError: model: must not be wrapped in DistributedDataParallel; pass model.module",
        small="ConfigError: max_size: must be at least 1, not 0",
    )
    for name, message in expected.items():
        assert first[name] == second[name] == message
    assert second["model"] == "ConfigError: model: must be a torch.nn.Module, not str"
    assert (
        first["model"] == f"DistributedError: rank 1 failed ({second['model']}); fix the error on that rank"
    )
    for errors in (first, second):
        assert (
            "ConfigError: the model, the loader, the optimizer and the loss cannot be copied"
            in errors["local"]
        )
        assert "requires the environment variable MASTER_ADDR, which is not set" in errors["environment"]


@pytest.mark.slow
def test_out_of_memory_in_a_backward_pass_of_one_rank_does_not_block_the_others(real):
    (first, *_), (second, *_) = real["out_of_memory_on_one_rank"]
    assert first == second
    assert first.largest == 2
    assert [(row.batch_size, row.status) for row in first.rows] == [
        (1, "fits"),
        (2, "fits"),
        (4, "out of memory"),
        (3, "out of memory"),
    ]
    assert first.rows[-1].reason == "rank 1: OutOfMemoryError: simulated"
    assert all(row.samples_per_second > 0 and row.peak_mib > 1 for row in first.rows[:2])
    for _, reported, seconds, total, trials in real["out_of_memory_on_one_rank"]:
        assert (reported, total, trials) == (True, 2.0, [])
        assert seconds < 200  # the budget is 300 s


def alone(folder):
    init_dist("pytorch", timeout=30)
    return find_batch_size(*own_objects(), max_size=1, budget=300)


@pytest.mark.slow
def test_a_process_group_with_one_process_does_not_block_the_search(tmp_path):
    assert run_in_two([alone], tmp_path, timeout=120, world=1)["alone"][0].largest == 1


@pytest.mark.slow
def test_ranks_find_the_batch_size_of_a_configuration(real):
    first, second = real["of_a_configuration"]
    assert first == second
    assert first.largest == 2
