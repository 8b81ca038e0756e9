"""Tests of runs whose data ends early, raises an error or hangs. Worker processes must not survive a run."""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from slipstream.errors import DataError, DataLoaderError
from slipstream.hooks import Hook
from slipstream.runner import Runner
from tiny_runs import Noisy, assert_same, loader, run, samples, training, validation, weights


class Faulty(Noisy):
    """A dataset of 40 samples, some of which raise an error or hang."""

    def __init__(self, faulty=(), error=ValueError, seconds=0.0):
        super().__init__()
        self.faulty, self.error, self.seconds = frozenset(faulty), error, seconds

    def __getitem__(self, index):
        if index in self.faulty:
            time.sleep(self.seconds)
            if self.error is not None:
                raise self.error("damaged")
        return super().__getitem__(index)


class Claims:
    """A batch sampler that claims to have more batches than it yields."""

    def __init__(self, yields, claims):
        self.yields, self.claims = yields, claims

    def __iter__(self):
        return iter([[0, 1, 2, 3]] * self.yields)

    def __len__(self):
        return self.claims


class Stream(IterableDataset):
    """A stream of `size` samples, divided among the workers."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from zip(*(part[worker :: max(workers, 1)] for part in samples(self.size)), strict=True)


class Sized(Stream):
    def __init__(self, size, claims):
        super().__init__(size)
        self.claims = claims

    def __len__(self):
        return self.claims


EPOCHS, ITERATIONS = dict(by_epoch=True, max_epochs=2), dict(by_epoch=False, max_iters=100)

# ---- epochs that end early -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "cfg"), [(0, EPOCHS), (1, ITERATIONS)], ids=["epochs", "iterations"])
def test_stop_iteration_from_a_sample_ends_the_run_and_names_the_sample(workers, cfg, tmp_path):
    data = loader(Faulty([13], StopIteration), num_workers=workers)
    with pytest.raises(DataError, match=r"sample 13 of Faulty raised StopIteration"):
        run(tmp_path, train_dataloader=data, train_cfg=cfg)


@pytest.mark.parametrize("cfg", [EPOCHS, ITERATIONS], ids=["epochs", "iterations"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            dict(dataset=Noisy(), batch_sampler=Claims(9, 21)),
            "train_dataloader ended after 9 of 21 batches; correct the length",
        ),
        (
            dict(dataset=Sized(18, 42), batch_size=2),
            "train_dataloader ended after 9 of 21 batches; correct the length",
        ),
        (
            dict(dataset=Sized(24, 42), batch_size=2, num_workers=2, drop_last=True),
            "train_dataloader ended after 12 of 21 batches",
        ),
    ],
    ids=["sampler", "stream", "stream-of-workers"],
)
def test_epoch_with_fewer_batches_than_the_loaders_length_raises_an_error(data, message, cfg, tmp_path):
    with pytest.raises(DataError, match=message):
        run(tmp_path, train_dataloader=data, train_cfg=cfg)


# ---- failing samples -------------------------------------------------------------------------------------------------


def test_skipped_samples_are_logged_and_a_resumed_run_uses_the_same_replacements(tmp_path):
    data = loader(Faulty([3, 17, 30]), skip_errors=3)
    kept = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False)))
    whole = run(tmp_path / "whole", train_dataloader=data, **kept)
    log = next(Path(whole.log_dir).glob("*.log")).read_text()
    assert log.count("Skipped sample 17 of Faulty: ValueError: damaged") == 1
    for number, workers in ((3, 0), (6, 2)):
        data = loader(Faulty([3, 17, 30]), skip_errors=3, num_workers=workers)
        file = str(tmp_path / "whole" / f"iter_{number}.pth")
        resumed = run(tmp_path / str(number), train_dataloader=data, resume=file, **kept)
        assert_same(weights(resumed), weights(whole))


def test_hanging_sample_ends_the_run_if_a_timeout_is_set(tmp_path, monkeypatch):
    # By default, torch waits 5 s before it kills a worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    data = loader(
        Faulty([13], seconds=60),
        shuffle=False,
        num_workers=1,
        timeout=1,
        prefetch_factor=1,
    )
    runner = Runner(**training(tmp_path, train_dataloader=data))
    with pytest.raises(DataLoaderError, match=r"train_dataloader: .*timed out after 1 seconds") as caught:
        runner.train()
    assert "iteration 2 of training" in caught.value.__notes__[0]


def test_error_explains_targets_that_are_not_classes_for_any_model_and_loss(tmp_path):
    inputs, targets = samples()
    targets[20] = 7
    data = loader(TensorDataset(inputs, targets), shuffle=False)
    with pytest.raises(IndexError, match=r"Target 7 is out of bounds\.") as caught:
        run(tmp_path / "own", train_dataloader=data)
    assert caught.value.__notes__ == ["(in epoch 1, iteration 3 of training)"]


# ---- worker processes ------------------------------------------------------------------------------------------------


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children():
    return {child.pid for child in multiprocessing.active_children()}


class Interrupt(Hook):
    """A hook that records the worker processes and calls `how` in the second step."""

    def __init__(self, how):
        self.how, self.pids = how, set()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 1:
            self.pids = children()
            self.how()

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.after_train_iter(runner, batch_idx)


def fail():
    raise RuntimeError("the step failed")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("how", "kind"),
    [(fail, RuntimeError), (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt)],
    ids=["error", "ctrl-c"],
)
def test_no_worker_survives_an_error_whose_traceback_is_kept(how, kind, persistent, tmp_path):
    workers = dict(num_workers=2, persistent_workers=persistent)
    cfg = {**validation(), "val_dataloader": loader(shuffle=False, **workers)}
    for mode in ("train", "val"):
        hook, before = Interrupt(how), children()
        runner = Runner(**training(tmp_path, train_dataloader=loader(**workers), custom_hooks=[hook], **cfg))
        with pytest.raises(kind) as caught:
            getattr(runner, mode)()
        pids = hook.pids - before
        assert len(pids) == 2
        assert not [pid for pid in pids if is_alive(pid)]
        assert caught.value.__traceback__ is not None


class Recorded(Dataset):
    """A dataset that creates a file named after the pid of the reading process for each sample, and then sleeps."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds

    def __len__(self):
        return 400

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        time.sleep(self.seconds)
        return samples()[0][0], samples()[1][0]


def train_with_workers(folder, seconds):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    data = loader(Recorded(folder, seconds), num_workers=2, shuffle=False, batch_size=2)
    run(folder / "run", train_dataloader=data)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 0.1), (signal.SIGKILL, 300)])
def test_no_worker_survives_the_death_of_its_run_even_if_the_worker_hangs(number, seconds, tmp_path):
    main = multiprocessing.get_context("fork").Process(target=train_with_workers, args=(tmp_path, seconds))
    main.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[0-9]*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    os.kill(main.pid, number)
    main.join(30)
    assert main.exitcode is not None
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


class Kill(Hook):
    """A hook that kills a worker of the training loader in validation, or one of the validation loader in training."""

    def __init__(self, mode):
        self.mode, self.pids = mode, set()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.reach("train", batch_idx == 3 and runner.epoch)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.reach("val", batch_idx == 1)

    def reach(self, mode, kills):
        if mode != self.mode:
            self.pids |= children() if not self.pids else set()
        elif kills and self.pids:
            os.kill(min(self.pids), signal.SIGKILL)
            time.sleep(5)  # torch's signal handler raises its error here


@pytest.mark.parametrize(("mode", "dead"), [("val", "train"), ("train", "val")])
def test_error_for_a_dead_worker_names_its_own_loader(mode, dead, tmp_path):
    data = {f"{name}_dataloader": loader(num_workers=1, persistent_workers=True) for name in ("train", "val")}
    if mode == "train":  # then the only worker is one of the validation loader
        data["train_dataloader"] = loader()
    with pytest.raises(DataLoaderError, match=rf"^{dead}_dataloader: .* is killed by signal: Killed"):
        run(tmp_path, custom_hooks=[Kill(mode)], **{**validation(), **data})
