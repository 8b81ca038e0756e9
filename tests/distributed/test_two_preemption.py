"""All ranks stop after the same step when one of them receives a signal."""

import os
import signal
import time

import pytest
import torch
from two_processes import run_in_two
from two_trainings import train

from slipstream.hooks import Hook
from slipstream.preemption import Preempted

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


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [interrupted_within_a_window]
    return run_in_two(functions, tmp_path_factory.mktemp("preemption"), timeout=120)


def test_signal_on_one_rank_stops_all_and_the_run_resumes_bitwise_identically(answers):
    first, second = answers["interrupted_within_a_window"]
    assert first == second, (first, second)
    stopped, same_weights, same_length = first
    assert stopped % 13 != 0
    assert same_weights
    assert same_length
