"""Trial processes: failures, hangs, and cleanup of every process."""

import os
import signal
import subprocess
import sys
import time
from contextvars import ContextVar

import pytest
import torch
from fakes import alive

from slipstream.tune import process as module
from slipstream.tune.process import WARMUP, Process, TrialError, descendants


class Job:
    """A job that calls `before` and then runs `steps` steps."""

    def __init__(self, before=lambda: None, steps=10**6):
        self.before = before
        self.steps = steps

    def train(self, observer, folder):
        self.before()
        for step in range(self.steps):
            observer.after_step(torch.tensor(float(step)))


def failure(job, seconds=60.0):
    with Process(job) as process, pytest.raises(TrialError) as caught:
        process.wait_for("warm", seconds)
    assert not alive(process._process.pid)
    return caught.value


def test_a_trial_reports_losses_and_times_requested_steps():
    with Process(Job()) as process:
        warm = process.wait_for("warm", 60)
        assert warm["losses"] == [float(i) for i in range(WARMUP)]
        assert len(process.warmup_seconds) == WARMUP
        assert warm["peak_mib"] > 1
        assert process.time(3, 2, 60)["seconds"] > 0
        assert process.time(4, 1, 60)["seconds"] > 0
    assert not alive(process._process.pid)


def test_a_trial_has_the_settings_of_this_process():
    setting = ContextVar("setting", default="unset")
    setting.set("changed")

    def check():
        assert setting.get() == "changed"
        assert torch.get_num_threads() == threads

    threads = torch.get_num_threads()
    with Process(Job(check)) as process:
        process.wait_for("warm", 60)


def test_an_error_is_reported_on_one_line():
    def fail():
        raise ValueError("wrong shape\nwith details")

    found = failure(Job(fail))
    assert (found.status, found.reason) == ("failed", "ValueError: wrong shape")


def test_out_of_memory_is_reported():
    def allocate():
        torch.empty(10**15)

    found = failure(Job(allocate))
    assert found.status == "out of memory"


def test_a_killed_process_counts_as_out_of_memory():
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    found = failure(Job(kill))
    assert found.status == "out of memory"
    assert "SIGKILL" in found.reason


def test_a_crash_names_the_signal_and_the_last_line_of_output():
    def crash():
        print("assertion in the compiler", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)  # another thread of the process receives the signal

    found = failure(Job(crash))
    assert (found.status, found.reason) == ("failed", "killed by SIGSEGV: assertion in the compiler")


def test_a_hang_times_out_and_its_processes_are_killed_even_in_other_sessions():
    def start_and_hang():
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(command, start_new_session=True)
        subprocess.Popen(command)
        time.sleep(600)

    with Process(Job(start_and_hang)) as process:
        with pytest.raises(TrialError, match="only 0 steps finished") as caught:
            process.wait_for("warm", 3)
        children = descendants(process._process.pid)
        assert len(children) == 2
    assert caught.value.status == "timed out"
    end = time.monotonic() + 10
    while any(map(alive, [process._process.pid, *children])) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, [process._process.pid, *children]))


def test_a_trial_does_not_change_the_objects_of_this_process():
    weight = torch.zeros(3)

    def change():
        weight.fill_(1.0)
        torch.manual_seed(123)

    before = torch.get_rng_state()
    with Process(Job(change)) as process:
        process.wait_for("warm", 60)
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pickled_trial_copies_tensors_instead_of_sharing_them(monkeypatch):
    monkeypatch.setattr(module, "forks", lambda: False)
    with pytest.raises(ValueError, match="cannot be copied to another process"):
        Process(Job(lambda: None))
    job = Adding(torch.zeros(2))
    with Process(job) as process:
        assert process.wait_for("warm", 120)["losses"][:2] == [2.0, 4.0]
    assert job.weight.tolist() == [0.0, 0.0]


class Adding:
    """A job that changes its own tensor, and can be pickled."""

    def __init__(self, weight):
        self.weight = weight

    def train(self, observer, folder):
        while True:
            self.weight.add_(1)
            observer.after_step(self.weight.sum())
