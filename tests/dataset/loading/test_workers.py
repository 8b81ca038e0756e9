"""Tests of worker processes, with real workers: timeouts, dead workers, signals, full shared memory, seeds."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from slipstream.dataset.loading import loader as loader_module
from slipstream.dataset.loading import workers
from slipstream.dataset.loading.collate import pseudo_collate
from slipstream.dataset.loading.loader import build_dataloader, limit_batches, set_epoch
from slipstream.dataset.loading.workers import Loading, end_workers, explain_worker_errors
from slipstream.errors import DataError, DataLoaderError
from slipstream.preemption import SIGNALS

# When a worker dies, torch's signal handler raises an error in whatever code the main thread is running. If this code
# is a weak reference callback, Python ignores the error, and the loader detects the dead worker later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Samples(Dataset):
    """Six samples; `read(2)` is called for sample 2."""

    def __init__(self, read=lambda index: None):
        self.read = read

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 2:
            self.read(index)
        return int(index)


def build(dataset, **options):
    return build_dataloader(dict(dataset=dataset, **options), 0, "train_dataloader", training=True)


def read(loader):
    loading = Loading(loader, "train_dataloader")
    with explain_worker_errors("train_dataloader"):
        try:
            return [batch.tolist() for batch in loading]
        finally:
            loading.close()  # torch may raise its error about a dead worker here


def fails(error):
    def fail(index):
        raise error

    return fail


@pytest.mark.parametrize("error", [DataError("'a.png' is broken"), ValueError("custom error")])
def test_worker_error_keeps_its_type_and_message(error):
    with pytest.raises(type(error), match=str(error)):
        read(build(Samples(fails(error)), num_workers=1))


def test_timeout_ends_the_worker_and_raises_an_error_that_names_the_loader(monkeypatch):
    # By default, torch waits 5 s before it terminates a worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = build(Samples(lambda index: time.sleep(60)), num_workers=1, timeout=1)
    loading = Loading(loader, "val_dataloader")
    worker = loading._iterator._workers[0]
    with (
        pytest.raises(DataLoaderError, match=r"val_dataloader: .*1 seconds"),
        explain_worker_errors("val_dataloader"),
    ):
        list(loading)
    loading.close()
    assert not worker.is_alive()


def test_error_for_a_dead_worker_contains_a_remedy():
    loader = build(Samples(lambda index: os.kill(os.getpid(), signal.SIGKILL)), num_workers=1)
    with pytest.raises(DataLoaderError, match="set num_workers=0 to see the error"):
        read(loader)


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, FileNotFoundError])
def test_lost_batch_is_explained_after_torch_has_forgotten_its_workers(error):
    class Iterator:  # torch raises these errors if a worker dies while it sends a batch
        running = True

        def __next__(self):
            raise error

        def _shutdown_workers(self):
            self.running = False

    loading = Loading(build(Samples(), num_workers=1), "train_dataloader")
    loading.close()
    loading._iterator = Iterator()
    with pytest.raises(DataLoaderError, match="train_dataloader: a worker died"):
        list(loading)
    assert not loading._iterator.running


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_during_the_start_of_a_worker_does_not_end_the_worker(monkeypatch, number):
    set_num_threads = torch.set_num_threads

    def interrupted(count):  # torch calls this in a worker before it calls the worker_init_fn
        os.kill(os.getpid(), number)
        set_num_threads(count)

    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    assert read(build(Samples(), num_workers=1, multiprocessing_context="fork")) == [[i] for i in range(6)]
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("count", [0, 1])
def test_only_lost_connections_to_workers_are_explained(count):
    with pytest.raises(ConnectionResetError, match="the server left"):
        read(build(Samples(fails(ConnectionResetError("the server left"))), num_workers=count))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(100))


@pytest.mark.parametrize("persistent", [False, True])
def test_limited_stream_starts_again_in_each_pass_and_its_workers_end(persistent):
    stream = build(Numbers(), num_workers=1, persistent_workers=persistent)
    limited = limit_batches(stream, 5, "limit_train_batches", "train_dataloader")
    assert len(read(stream)) == 100
    for _ in range(2):
        assert read(limited) == [[i] for i in range(5)]
    for loader in (limited, stream):
        workers.end_workers(loader)
    assert not [child for child in torch.multiprocessing.active_children() if "Process" in child.name]


def test_batch_that_cannot_be_sent_raises_an_error_instead_of_waiting_forever(capfd):
    class Unsendable(Samples):
        def __getitem__(self, index):
            return threading.Lock()

    with pytest.raises(DataLoaderError, match="it may have printed an error"):
        read(build(Unsendable(), num_workers=1, collate_fn=pseudo_collate))
    assert "cannot pickle '_thread.lock' object" in capfd.readouterr().err


IN_SMALL_SHARED_MEMORY = """
import torch
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.workers import Loading, end_workers, explain_worker_errors
from slipstream.errors import DataLoaderError

class Big(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.zeros(500_000)

cfg = dict(dataset=Big(), batch_size=2, num_workers=1)
try:
    with explain_worker_errors("train_dataloader"):
        list(Loading(build_dataloader(cfg, 0, "train_dataloader", True), "train_dataloader"))
except DataLoaderError as error:
    print(error)
"""


def test_error_reports_that_shared_memory_is_too_small(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(IN_SMALL_SHARED_MEMORY)
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    if subprocess.run([*mount, f"{small} true"], capture_output=True).returncode:
        pytest.skip("requires permission to mount file systems in a user namespace")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    command = [*mount, f"{small} {sys.executable} {script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert "no shared memory left for their batches" in done.stdout


def test_auto_starts_one_worker_for_each_core_of_the_process(monkeypatch):
    monkeypatch.setattr(loader_module, "cores", lambda: 6)
    monkeypatch.setattr(loader_module, "get_local_size", lambda: 2)
    assert build(Samples(), num_workers="auto").num_workers == 3


def test_seed_of_the_workers_depends_on_the_epoch_the_rank_and_the_seed_of_the_generator(monkeypatch):
    def base_seed(epoch, rank, seed):
        monkeypatch.setattr(workers, "get_rank", lambda: rank)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = torch.utils.data.DataLoader(Samples(), generator=generator)
        loading = Loading(loader, "train_dataloader", (7, epoch))
        assert loader.generator is generator
        return loading._iterator._base_seed

    cases = [(epoch, rank, seed) for epoch in (0, 1) for rank in (0, 1) for seed in (None, 3)]
    seeds = [base_seed(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    assert [base_seed(*case) for case in cases] == seeds


class Tagged(Dataset):
    tag, epoch = 0.0, 0

    def __len__(self):
        return 8

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        assert type(get_worker_info().dataset) is Tagged
        return torch.tensor([self.tag, self.epoch])


def test_every_changed_attribute_of_a_dataset_is_found():
    class Node:
        pass

    dataset, node = Node(), Node()
    for name in "abcdef":
        setattr(dataset, name, 1.5)
    dataset.options = {"first": node, "last": [Node()]}
    for _ in range(2000):  # deeper than Python's recursion limit
        node.next = Node()
        node = node.next
    for owner, name in [*((dataset, name) for name in "abcdef"), (dataset.options["last"][0], "new")]:
        before = workers._attributes(dataset)
        assert workers._attributes(dataset) == before
        setattr(owner, name, 2.5)
        assert workers._attributes(dataset) != before, name


def _tag(worker_id):
    get_worker_info().dataset.tag = 7.0


def test_worker_init_fn_and_set_epoch_change_the_users_dataset_in_persistent_workers():
    options = dict(batch_size=4, num_workers=1, persistent_workers=True, worker_init_fn=_tag)
    loader = build_dataloader(DataLoader(Tagged(), **options), 0, "train_dataloader", training=True)
    workers = set()
    for epoch in range(4):
        set_epoch(loader, epoch)
        if epoch == 3:
            loader.dataset.epoch = 9.0  # workers that have copied the dataset are replaced
        batches = list(Loading(loader, "train_dataloader"))
        assert torch.equal(
            torch.cat(batches), torch.tensor([[7.0, 9.0 if epoch == 3 else epoch]]).repeat(8, 1)
        )
        workers.add(loader._iterator._workers[0].pid)
    end_workers(loader)
    assert len(workers) == 2
    assert loader.worker_init_fn is _tag
