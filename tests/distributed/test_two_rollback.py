"""Test that both ranks roll back if the loss of one rank is NaN (with DDP and FSDP2) or has a spike."""

import math

import pytest
import torch
from two_processes import run_in_two

from slipstream.dist import get_rank, init_dist
from slipstream.hooks import Hook
from slipstream.sharding import full_tensor
from tiny_runs import Net, run

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds


class Breaks(Net):
    """A model whose loss on rank 1 is NaN in the calls listed in `broken`."""

    def __init__(self, broken=()):
        super().__init__()
        self.broken, self.calls = broken, 0

    def forward(self, inputs, targets, mode):
        out = super().forward(inputs, targets, mode)
        self.calls += 1
        if self.calls in self.broken and get_rank() == 1:
            out["loss"] = out["loss"] * math.nan
        return out


class Skip(Hook):
    def before_train(self, runner):
        info = dict(count=0, skipped=[[3, 4], [7, 8]], samples_per_step=runner.samples_per_step)
        runner.message_hub.update_info("rollback", info)
        runner.rollback.load()


def train(folder, broken, *hooks, **speed):
    torch.manual_seed(0)
    runner = run(
        folder,
        model=Breaks(broken),
        train_cfg=dict(by_epoch=False, max_iters=10),
        launcher="pytorch",
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False, max_keep_ckpts=3),
            logger=dict(type="LoggerHook", interval=5),
        ),
        custom_hooks=list(hooks),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        speed=dict(nan_guard="rollback", **speed),
    )
    weights = {name: full_tensor(p).tolist() for name, p in runner.model.named_parameters()}
    log = next(folder.glob("*/*.log")).read_text() if get_rank() == 0 else ""
    return weights, sorted(runner.rollback.skipped), log


def both(folder, **speed):
    init_once()
    return train(folder / "one", [4, 8], **speed), train(folder / "other", [], Skip(), **speed)


def init_once():
    if not torch.distributed.is_initialized():
        init_dist("pytorch", backend="gloo")


def ddp(folder):
    return both(folder, accumulate=2)


def fsdp2(folder):
    return both(folder, accumulate=2, parallel="fsdp2")


class Spikes(Breaks):
    """A model whose loss on rank 1 is 1000 higher in the calls listed in `broken`."""

    def forward(self, inputs, targets, mode):
        out = Net.forward(self, inputs, targets, mode)
        self.calls += 1
        if self.calls in self.broken and get_rank() == 1:
            out["loss"] = out["loss"] + 1000
        return out


def spike(folder):
    init_once()
    torch.manual_seed(0)
    runner = run(
        folder,
        model=Spikes([18]),
        train_cfg=dict(by_epoch=False, max_iters=24),
        launcher="pytorch",
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=5, by_epoch=False),
            logger=dict(type="LoggerHook", interval=2),
        ),
        custom_hooks=[dict(type="LossSpikeHook", action="rollback", window=10, min_history=5)],
    )
    return sorted(runner.rollback.skipped), max(runner.message_hub.get_info("loss_spike/loss")[0])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([ddp, fsdp2, spike], tmp_path_factory.mktemp("rollback"), timeout=100)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_ranks_continue_without_the_batches_of_a_fault_on_one_rank(answers, kind):
    for answer in answers[kind]:
        assert not isinstance(answer, str), answer
        (weights, skipped, _), (expected, *_) = answer
        assert skipped == [4, 8]
        assert weights == expected
    (one, *_), (other, *_) = answers[kind]
    assert one[0] == other[0]
    assert "on rank 1: 'loss' became nan at iteration 4" in one[2]
    line = next(line for line in one[2].splitlines() if "The batch of iteration 4 contains" in line)
    assert "on rank 0; samples" in line
    assert line.endswith("on rank 1")


def test_both_ranks_roll_back_to_before_a_spike_on_one_rank(answers):
    for answer in answers["spike"]:
        assert not isinstance(answer, str), answer
        skipped, highest = answer
        assert skipped == [17, 18]
        assert highest < 10
    assert answers["spike"][0] == answers["spike"][1]  # the recorded loss is the mean over both ranks
