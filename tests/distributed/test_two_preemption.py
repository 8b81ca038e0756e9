"""All ranks stop after the same step when one of them receives a signal."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from two_processes import run_in_two
from two_trainings import train

from slipstream import accelerate
from slipstream.dist import get_rank, init_dist, is_distributed
from slipstream.errors import CheckpointError
from slipstream.hooks import Hook
from slipstream.preemption import Preempted, Preemption

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds


class SignalToRank1(Hook):
    """Send SIGUSR1 to rank 1 after a step."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(0.05)
        if runner.iter + 1 == 4 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


OPTIONS = dict(
    max_epochs=12,
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=13),
)


def interrupted_within_a_window(folder):
    options = dict(OPTIONS, default_hooks=dict(checkpoint=None))
    stopped, seen = None, []
    try:
        train(folder / "a", world=2, custom_hooks=[SignalToRank1()], prepare=seen.append, **options)
    except Preempted:
        stopped = seen[0].iter
    resumed = train(folder / "a", world=2, resume=True, **options)
    whole = train(folder / "b", world=2, **options)
    one, other = (runner.model.state_dict() for runner in (resumed, whole))
    return stopped, all(one[name].equal(other[name]) for name in one), resumed.iter == whole.iter


def rank_that_ends_before_the_signal(folder):
    """Rank 0 leaves the block immediately. Rank 1 must not wait for rank 0."""
    with Preemption() as preemption:
        if torch.distributed.get_rank() == 0:
            return True
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
        return preemption.requested()


def own_loop(path, resume=False, signal_at=None):
    """Train with `accelerate`, and save after the accumulation window in which a signal was received, as in the docs.

    Return the weights and the number of batches.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    data = torch.randn(60, 2, 6, 4, dtype=torch.float64)[:, get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = accelerate(model, optimizer, speed=dict(accumulate=13), total_steps=60, compute_loss=squares)
    if resume:
        step.load(path)
    with Preemption() as preemption:
        for batch in data[step.steps :]:
            step(batch)
            if signal_at is not None:
                time.sleep(0.05)
                if step.steps == signal_at and get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    with pytest.raises(CheckpointError, match="save when the window ends"):
                        step.save(path)
            if preemption.requested() and step.updated:
                step.save(path)
                break
    return model.weight.detach(), step.steps


def squares(model, batch):
    return model(batch).square().mean()


def own_loop_saves_at_the_end_of_the_window(folder):
    folder.mkdir(exist_ok=True)
    if not is_distributed():
        init_dist("pytorch")
    _, stopped = own_loop(folder / "a.pth", signal_at=4)
    resumed, length = own_loop(folder / "a.pth", resume=True)
    whole, whole_length = own_loop(folder / "b.pth")
    return stopped, torch.equal(resumed, whole), length == whole_length == 60


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [
        interrupted_within_a_window,
        own_loop_saves_at_the_end_of_the_window,
        rank_that_ends_before_the_signal,
    ]
    return run_in_two(functions, tmp_path_factory.mktemp("preemption"), timeout=120)


def test_signal_on_one_rank_stops_all_and_the_run_resumes_bitwise_identically(answers):
    first, second = answers["interrupted_within_a_window"]
    assert first == second, (first, second)
    stopped, same_weights, same_length = first
    assert stopped % 13 != 0
    assert same_weights
    assert same_length


def test_own_loop_saves_at_the_end_of_the_accumulation_window_and_resumes_bitwise_identically(answers):
    first, second = answers["own_loop_saves_at_the_end_of_the_window"]
    assert first == second, (first, second)
    stopped, same_weights, same_length = first
    assert stopped in (13, 26, 39, 52)
    assert same_weights
    assert same_length


def test_rank_that_has_ended_does_not_block_the_others(answers):
    assert answers["rank_that_ends_before_the_signal"][0] is True
    assert isinstance(answers["rank_that_ends_before_the_signal"][1], bool)
