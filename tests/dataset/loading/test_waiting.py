"""Tests of waiting for batches, with real worker processes: warnings, timeouts, dead workers, full shared memory."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.dataset.loading import waiting
from slipstream.dataset.loading.collate import pseudo_collate
from slipstream.dataset.loading.limits import limit_batches
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.waiting import STALL_WARNING, Loading, explain_worker_errors
from slipstream.dataset.loading.worker_init import signals_blocked
from slipstream.errors import ConfigError, DataLoaderError, SlipstreamError
from slipstream.preemption import SIGNALS

# When a worker dies, torch's signal handler raises an error in whatever code the main thread is running. If this code
# is a weak reference callback, Python ignores the error, and the loader detects the dead worker later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Slow(Dataset):
    """A dataset of six samples. Loading sample 2 takes `seconds`, or sends the signal `kill` to the process."""

    def __init__(self, seconds=0.0, kill=None):
        self.seconds, self.kill = seconds, kill

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 2 and self.kill:
            os.kill(os.getpid(), self.kill)
        if index == 2:
            time.sleep(self.seconds)
        return int(index)


def build(dataset, **options):
    options = dict(sampler=dict(type="DefaultSampler", shuffle=False)) | options
    return build_dataloader(dict(dataset=dataset, **options), 0, "train_dataloader", training=True)


def read(loader):
    """Return the batches and the warnings of one pass."""
    warnings = []
    loading = Loading(loader, "train_dataloader", warnings.append)
    with explain_worker_errors("train_dataloader"):
        try:
            return [batch.tolist() for batch in loading], warnings
        finally:
            loading.close()  # torch may raise its error about a dead worker here


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-stall-warning"]


def test_warning_for_a_slow_sample_in_the_main_process_names_its_line():
    batches, warnings = read(build(Slow(1.3), stall_warning=0.2))
    assert batches == [[i] for i in range(6)]
    assert len(warnings) in (2, 3), "the time between warnings does not double"
    assert warnings[0].startswith("train_dataloader: no batch for 0.2")
    assert "after 2 batches" in warnings[0]
    assert f"executing __getitem__ ({__file__}:" in warnings[0]
    assert "train_dataloader.timeout=SECONDS" in warnings[0]


def test_slow_worker_warns_with_its_pid():
    batches, warnings = read(build(Slow(0.6), stall_warning=0.3, num_workers=1))
    assert batches == [[i] for i in range(6)]
    assert warnings
    assert "A worker process (pid " in warnings[0]


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_there_is_no_warning_if_batches_arrive_in_time_or_the_step_is_slow(seconds):
    warnings = []
    for batch in Loading(build(Slow(), stall_warning=seconds), "train_dataloader", warnings.append):
        time.sleep(0.8 if batch == 0 else 0)  # the consumer is slow, not the loader
    assert warnings == []


def test_thread_ends_at_the_end_of_a_pass_and_on_close():
    before = set(watchers())
    loading = Loading(build(Slow(), stall_warning=0.1), "train_dataloader", print)
    batches = iter(loading)
    next(batches)
    (thread,) = set(watchers()) - before
    loading.close()
    thread.join(5)
    assert not thread.is_alive()
    read(build(Slow(), stall_warning=0))
    assert set(watchers()) <= before


def test_every_loader_warns_after_a_minute_by_default():
    assert STALL_WARNING == 60
    for loader in (build(Slow()), DataLoader(Slow()), build(DataLoader(Slow()))):
        assert Loading(loader, "train_dataloader", print).seconds == 60


def test_timeout_ends_the_worker_and_raises_an_error_that_names_the_option(monkeypatch):
    # By default, torch waits 5 s before it terminates a worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = build(Slow(60), num_workers=1, timeout=1, multiprocessing_context="fork")
    loading = Loading(loader, "val_dataloader", print)
    worker = loading._iterator._workers[0]
    start = time.monotonic()
    message = r"no batch arrived within 1 s \(val_dataloader.timeout\)"
    with pytest.raises(DataLoaderError, match=message), explain_worker_errors("val_dataloader"):
        list(loading)
    assert time.monotonic() - start < 5
    loading.close()
    assert not worker.is_alive()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            signal.SIGKILL,
            r"out of memory.*Lower num_workers|died while sending a batch",
        ),
        (signal.SIGABRT, r"num_workers=0 to see the error|died while sending a batch"),
    ],
)
def test_error_for_a_dead_worker_contains_a_remedy(number, message):
    loader = build(Slow(kill=number), num_workers=1)
    with pytest.raises(RuntimeError, match=message) as caught:
        read(loader)
    assert isinstance(caught.value, DataLoaderError)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_during_the_start_of_a_worker_does_not_end_the_worker(monkeypatch, number):
    set_num_threads = torch.set_num_threads

    def interrupted(count):  # torch calls this in a worker before it calls the worker_init_fn
        os.kill(os.getpid(), number)
        set_num_threads(count)

    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    assert read(build(Slow(), num_workers=1, multiprocessing_context="fork"))[0] == [[i] for i in range(6)]
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_fork_server_starts_without_blocked_signals(monkeypatch):
    masks, start = [], forkserver.ensure_running
    mask = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())  # noqa: E731
    monkeypatch.setattr(forkserver, "ensure_running", lambda: (masks.append(mask()), start()))
    loader = build(Slow(), num_workers=1, multiprocessing_context="forkserver")
    with signals_blocked(loader):
        assert signal.SIGTERM in mask()
    assert masks == [set()]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_signals_remain_blocked_when_the_first_process_is_spawned(monkeypatch, method):
    tracker = resource_tracker.ResourceTracker()  # as in a process that has not started a tracker
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    with signals_blocked(build(Slow(), num_workers=1, multiprocessing_context=method)):
        tracker.getfd()  # Python calls this when it spawns a process
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    tracker._stop()
    assert {signal.SIGINT, signal.SIGTERM} <= blocked


def test_only_lost_connections_to_workers_are_explained():
    class Offline(Slow):
        def __getitem__(self, index):
            raise ConnectionResetError("the server left")

    for workers in (0, 1):
        with pytest.raises(ConnectionResetError, match="the server left"):
            read(build(Offline(), num_workers=workers))
    loading = Loading(build(Slow(), num_workers=1), "train_dataloader", print)
    loading._iterator._next_data = lambda: (_ for _ in ()).throw(ConnectionResetError("[Errno 104]"))
    with pytest.raises(DataLoaderError, match="a worker process died while sending a batch"):
        next(iter(loading))
    loading.close()


class Stopping(IterableDataset):
    """Yields two samples, and then nothing for a second."""

    def __iter__(self):
        yield from (0, 1)
        time.sleep(1)


def test_workers_of_a_limited_stream_are_watched_and_stopped():
    stream = build_dataloader(dict(dataset=Stopping(), num_workers=1), 0, "train_dataloader", training=True)
    limited = limit_batches(stream, 5, "limit_train_batches", "train_dataloader")
    loading = Loading(limited, "train_dataloader", print)
    assert next(iter(loading)).tolist() == [0]
    with pytest.raises(DataLoaderError, match="a worker process died while sending a batch"):
        loading._check_connection(EOFError())
    (worker,) = loading._iterator._workers
    assert f"A worker process (pid {worker.pid}) is slow or has hung" in loading._warning(60)
    loading.close()
    assert not worker.is_alive()


def test_batch_that_cannot_be_sent_raises_an_error_instead_of_waiting_forever(capfd):
    class Unsendable(Slow):
        def __getitem__(self, index):
            return threading.Lock()

    loader = build(Unsendable(), num_workers=1, collate_fn=pseudo_collate)
    with pytest.raises(DataLoaderError, match=r"exited unexpectedly; it may have printed an error"):
        read(loader)
    assert "cannot pickle '_thread.lock' object" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError(
                "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
                "are out of shared memory. Please try to raise your shared memory limit."
            ),
            "no shared memory left.*--shm-size.*num_workers=0",
        ),
        (
            RuntimeError(
                "unable to open shared memory object </torch_7_1_0> in read-write mode: No such file"
            ),
            "no shared memory left",
        ),
        (
            RuntimeError("unable to write to file </torch_7_1_0>: No space left on device (28)"),
            "no shared memory left",
        ),
        (RuntimeError("received 0 items of ancdata"), "ulimit -n 65536.*set_sharing_strategy"),
        (
            RuntimeError("Too many open files. Communication with the workers is no longer possible. Please"),
            "ulimit -n 65536.*set_sharing_strategy",
        ),
    ],
)
def test_torch_messages_are_recognized(error, message):
    with pytest.raises(DataLoaderError, match=message) as caught, explain_worker_errors("train_dataloader"):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith("train_dataloader: ")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "runs/epoch_1.pth"),
        OSError(24, "Too many open files", "a.png"),
        RuntimeError(
            "[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0"
        ),
        RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376"),
        RuntimeError(
            "NCCL error: unable to create shared memory segment /dev/shm/nccl-X: No space left on device"
        ),
        DataLoaderError("train_dataloader: DataLoader worker (pid 7) exited unexpectedly; explained"),
        ValueError("DataLoader timed out after 5 seconds"),
    ],
)
def test_other_errors_are_not_changed(error):
    with pytest.raises(type(error)) as caught, explain_worker_errors("train_dataloader"):
        raise error
    assert caught.value is error


IN_SMALL_SHARED_MEMORY = """
import torch
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.waiting import Loading, explain_worker_errors
from slipstream.errors import DataLoaderError

class Big(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.zeros(500_000)

def message(collate):
    cfg = dict(dataset=Big(), batch_size=2, num_workers=1, collate_fn=dict(type=collate))
    try:
        with explain_worker_errors("train_dataloader"):
            list(Loading(build_dataloader(cfg, 0, "train_dataloader", True), "train_dataloader", print))
    except DataLoaderError as error:
        print(error)

message("default_collate")
message("pseudo_collate")
open("/dev/shm/other", "wb", buffering=0).write(bytes(2**20))
message("default_collate")
"""


def test_error_reports_that_shared_memory_is_too_small(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(IN_SMALL_SHARED_MEMORY)
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    if subprocess.run([*mount, f"{small} true"], capture_output=True).returncode:
        pytest.skip("requires permission to mount file systems in a user namespace")
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [*mount, f"{small} {sys.executable} {script}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": source},
    )
    collated, lost, full = done.stdout.strip().splitlines()
    for line in (collated, lost, full):
        assert line.startswith("train_dataloader: ")
        assert "/dev/shm has 1 MiB" in line
        assert "num_workers=0" in line
    assert "no shared memory left for their batches" in collated
    assert "a batch may not fit in shared memory" in lost
    assert "no shared memory left" in full
    assert re.search(r"of which 0(\.\d+)? MiB is free", full)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(timeout=5), r"timeout: requires worker processes.*num_workers"),
        (dict(timeout=-1, num_workers=1), "timeout: must be a float of at least 0, not -1"),
        (dict(timeout=float("nan"), num_workers=1), "timeout: must be a float of at least 0, not nan"),
        (dict(stall_warning="60"), "stall_warning: must be a float of at least 0, not '60'"),
        (dict(stall_warning=True), "stall_warning: must be a float of at least 0, not True"),
        (dict(stall_warning=float("inf")), "stall_warning: must be a float of at least 0, not inf"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(Slow(), **options)
    assert isinstance(caught.value, SlipstreamError)


def test_timeout_without_workers_is_dropped_if_the_number_is_chosen_automatically(monkeypatch):
    chosen = "slipstream.dataset.loading.loader.with_workers"
    monkeypatch.setattr(chosen, lambda options, *_: {**options, "num_workers": 0})
    loader = build(Slow(), num_workers="auto", timeout=5)
    assert [batch.item() for batch in loader] == list(range(6))


def test_seed_of_the_workers_depends_on_the_epoch_the_rank_and_the_seed_of_the_generator(monkeypatch):
    def base_seed(epoch, rank, seed):
        monkeypatch.setattr(waiting, "get_rank", lambda: rank)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loading = Loading(DataLoader(Slow(), generator=generator), "train_dataloader", print, (0, epoch))
        loading.close()
        assert loading.loader.generator is generator
        return loading._iterator._base_seed

    cases = [(0, 0, None), (1, 0, None), (0, 1, None), (0, 0, 1), (0, 0, 2)]
    seeds = [base_seed(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    assert [base_seed(*case) for case in cases] == seeds
