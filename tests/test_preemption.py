"""A run saves its state after a signal, and the resumed run continues as if it had not been interrupted."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.hooks import Hook, PreemptionHook
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.preemption import EXIT_STATUS, SIGNALS, Interrupted, Preempted, Preemption
from slipstream.runner import Runner
from tiny_runs import Net, Noisy, assert_same, loader, run, training, validation, weights


class Signal(Hook):
    """A hook that sends a signal to this process after a step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.step:
            os.kill(os.getpid(), self.number)


CASES = {
    "within an epoch": (3, dict(train_cfg=dict(by_epoch=True, max_epochs=3), **validation())),
    "at the end of an epoch": (5, dict(train_cfg=dict(by_epoch=True, max_epochs=3), **validation())),
    "before a validation": (4, dict(train_cfg=dict(by_epoch=False, max_iters=9, val_interval=4), **validation())),
    "within a window": (
        4, dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=3)),
    ),
    "after the last step": (10, dict()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_preempted_run_is_bitwise_identical_after_resuming(tmp_path, case):
    step, changes = CASES[case]
    options = dict(model=dict(type=Net, dropout=0.5, norm=True), train_dataloader=loader(Noisy()), **changes)
    before = [signal.getsignal(number) for number in SIGNALS]
    interrupted = Runner(**training(tmp_path / "a", custom_hooks=[Signal(step)], **options))
    with pytest.raises(Preempted) as stopped:
        interrupted.train()
    assert stopped.value.code == EXIT_STATUS == 75
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert (tmp_path / "a" / "last_checkpoint").read_text().endswith("preempted.pth")
    resumed, whole = run(tmp_path / "a", resume=True, **options), run(tmp_path / "b", **options)
    assert resumed.iter == whole.iter
    assert_same(weights(resumed), weights(whole))
    assert [
        h.data[0].tolist() for n, h in resumed.message_hub.log_scalars.items() if n.startswith("val/acc")
    ] == [h.data[0].tolist() for n, h in whole.message_hub.log_scalars.items() if n.startswith("val/acc")]


class InterruptAt(Hook):
    """A hook that sends SIGINT to this process at a stage of the run."""

    priority = "LOWEST"
    runs_last = True

    def __init__(self, stage):
        setattr(self, stage, lambda runner: signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize("stage", ["before_run", "before_train"])
def test_signal_before_the_first_step_stops_the_run_without_a_checkpoint(tmp_path, capfd, stage):
    class Early(InterruptAt):
        runs_last = False

    with pytest.raises(Interrupted) as stopped:
        run(tmp_path, custom_hooks=[Early(stage)], log_level="INFO")
    assert stopped.value.code == EXIT_STATUS
    assert "SIGINT received: no steps were run, so there is nothing to save" in capfd.readouterr().out
    assert not list(tmp_path.glob("*.pth"))
    assert_same(weights(run(tmp_path, resume=True)), weights(run(tmp_path / "whole")))


@pytest.mark.parametrize("stage", ["after_train", "after_run", "release"])
def test_signal_after_the_last_step_does_not_interrupt_the_last_checkpoint(tmp_path, stage):
    before = signal.getsignal(signal.SIGINT)
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=-1))
    finished = run(tmp_path, custom_hooks=[InterruptAt(stage)], default_hooks=hooks)
    assert finished.iter == 10
    assert (tmp_path / "epoch_2.pth").is_file()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_raises_a_keyboard_interrupt_after_saving(tmp_path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(tmp_path, custom_hooks=[Signal(3, signal.SIGINT)])
    assert stopped.type is Interrupted
    assert (tmp_path / "preempted.pth").is_file()


def test_user_handlers_and_ignored_signals_are_not_changed():
    received = []
    previous = (
        signal.signal(signal.SIGUSR1, lambda *_: received.append(1)),
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.requested()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert preemption.requested()
            assert preemption.signal == "SIGUSR2"
    finally:
        signal.signal(signal.SIGUSR1, previous[0])
        signal.signal(signal.SIGHUP, previous[1])
    assert received == [1]


LOOP = """
import time
from slipstream import Preemption
with Preemption() as preemption:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
        if preemption.requested():
            print("requested", flush=True)
"""


def test_second_signal_ends_the_process():
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the same request, delivered twice
        assert process.stdout.readline() == "requested\n"
        time.sleep(1.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert "SIGTERM received" in process.stderr.read()
    finally:
        process.kill()
        process.wait()


RUN = """
import sys, time
sys.path.insert(0, sys.argv[2])
from tiny_runs import Noisy, loader, run

class Slow(Noisy):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)

workers = dict(num_workers=2, persistent_workers=True)
options = dict(train_dataloader=loader(Slow(), **workers), train_cfg=dict(by_epoch=True, max_epochs=200))
run(sys.argv[1], log_level="INFO", resume=True, **options)
"""


def test_signal_to_all_processes_of_a_run_saves_its_state(tmp_path):
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", RUN, str(tmp_path), folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while "Saved checkpoint epoch_1.pth" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.wait(60) == EXIT_STATUS
        assert "run the same command with resume=True" in process.stdout.read()
        assert (tmp_path / "preempted.pth").is_file()
        time.sleep(0.5)
        with pytest.raises(ProcessLookupError):  # no worker process remains
            os.killpg(process.pid, 0)
    finally:
        process.kill()
        process.wait()


WORKERS = """
import sys
import time
import torch
from torch.utils.data import DataLoader
from slipstream import Preemption, feed
from slipstream.preemption import EXIT_STATUS

def collate(samples):
    time.sleep(0.02)
    return torch.tensor(samples)

options = dict(num_workers=2, collate_fn=collate, multiprocessing_context=sys.argv[1])
loader = DataLoader(list(range(8)) * 99, batch_size=2, **options)
if __name__ == "__main__":
    with Preemption() as preemption:
        for index, batch in enumerate(feed(loader)):
            if index == 5:
                print("started", flush=True)
            if preemption.requested():
                print("saved", flush=True)
                sys.exit(EXIT_STATUS)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signal_to_all_processes_of_a_custom_loop_does_not_end_its_workers(tmp_path, method):
    script = tmp_path / "loop.py"
    script.write_text(WORKERS)
    process = subprocess.Popen(
        [sys.executable, str(script), method], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "started\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == EXIT_STATUS
        assert process.stdout.read() == "saved\n"
    finally:
        process.kill()
        process.wait()


def test_runner_that_was_stopped_cannot_train_again(tmp_path):
    runner = Runner(**training(tmp_path, custom_hooks=[Signal(3)]))
    with pytest.raises(Preempted):
        runner.train()
    with pytest.raises(
        ConfigError, match=r"middle of an epoch \(Preempted\).*create a new Runner with resume=True"
    ):
        runner.train()


class TwoOptimizers(Net):
    """A model that trains its two layers with separate optimizers and accumulation windows."""

    def train_step(self, data, optim_wrapper):
        losses = {}
        for name, wrapper in optim_wrapper.items():
            loss = self(*data, mode="loss")["loss"]
            wrapper.update_params(loss)
            losses[name] = loss.detach()
        return {"loss": sum(losses.values())}


@pytest.mark.parametrize("counts", [(3, 3), (1, 4)])
def test_windows_of_several_optimizers_are_bitwise_identical_after_resuming(tmp_path, counts):
    def optimizers(model):
        layers = {"first": model.first, "last": model.last}
        return OptimWrapperDict(
            **{
                name: OptimWrapper(torch.optim.SGD(layer.parameters(), lr=0.1), accumulative_counts=count)
                for (name, layer), count in zip(layers.items(), counts, strict=True)
            }
        )

    def runner(folder, **changes):
        torch.manual_seed(0)
        model = TwoOptimizers()
        return Runner(**training(folder, model=model, optim_wrapper=optimizers(model), **changes))

    with pytest.raises(Preempted):
        runner(tmp_path / "a", custom_hooks=[Signal(4)]).train()
    resumed, whole = runner(tmp_path / "a", resume=True), runner(tmp_path / "b")
    resumed.train()
    whole.train()
    assert_same(weights(resumed), weights(whole))


class Waits(Hook):
    """A hook that waits during a step until the time limit is certainly reached."""

    def __init__(self, step):
        self.step = step

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.step:
            time.sleep(1.5)


@pytest.mark.parametrize("case", ["within an epoch", "before a validation", "after the last step"])
def test_run_with_a_time_limit_ends_normally_and_resumes(tmp_path, case):
    step, changes = CASES[case]
    options = dict(model=dict(type=Net, dropout=0.5, norm=True), train_dataloader=loader(Noisy()), **changes)
    limit = dict(preemption=dict(max_time=1.0))
    stopped = run(tmp_path / "a", custom_hooks=[Waits(step)], default_hooks=limit, **options)
    assert stopped.iter == step
    assert (tmp_path / "a" / "preempted.pth").is_file() == (case != "after the last step")
    resumed, whole = run(tmp_path / "a", resume=True, **options), run(tmp_path / "b", **options)
    stopped.train()  # the same Runner can also continue
    for runner in (resumed, stopped):
        assert_same(weights(runner), weights(whole))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (90, 90),
        (timedelta(hours=1), 3600),
        ("01:02:03", 3723),
        ("01:00:00:00", 86400),
        ("1h", None),
        (0, None),
    ],
)
def test_time_limits(limit, seconds):
    if seconds is None:
        with pytest.raises(ConfigError, match=r"^max_time: must be a positive number of seconds"):
            PreemptionHook(max_time=limit)
    else:
        assert PreemptionHook(max_time=limit).handle_signals()._max_seconds == seconds
