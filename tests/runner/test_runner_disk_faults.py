"""Errors of the disk have the library's type, and name the path and a remedy."""

import errno
import os
import resource
import signal

import pytest
import torch

from slipstream.checkpoint import search, sharded
from slipstream.errors import CheckpointError, ConfigError, NonFiniteLossError
from slipstream.hooks import EMAHook, Hook, average_best
from slipstream.hooks import checkpoint as checkpoint_hook
from slipstream.runner import logs
from slipstream.runner.folder_lock import FolderLock
from tiny_runs import Net, Scripted, run, validation


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))


CHECKPOINTS = dict(type="CheckpointHook", interval=1, max_keep_ckpts=1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("module", "name"), [(search, "write_text"), (checkpoint_hook, "remove_checkpoint")])
def test_error_after_a_checkpoint_was_written_names_it(tmp_path, monkeypatch, module, name, asynchronous):
    monkeypatch.setattr(module, name, full)
    with pytest.raises(CheckpointError, match=r"epoch_\d.pth was written, .*No space left .*free space"):
        run(tmp_path, default_hooks=dict(checkpoint=dict(CHECKPOINTS, async_save=asynchronous)))
    assert (tmp_path / "epoch_1.pth").is_file()


def test_error_of_removed_average_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(average_best, "remove_checkpoint", full)
    hook = dict(type="AverageBestHook", metric="acc", count=1)
    with pytest.raises(CheckpointError, match=r"epoch_2.pth was written, .*free space"):
        run(tmp_path, custom_hooks=[hook], **validation(Scripted([0.1, 0.2])))


def test_error_while_saving_a_preempted_run_names_the_file(tmp_path, monkeypatch):
    class Signal(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sharded, "save_checkpoint", full)
    with pytest.raises(
        CheckpointError, match=r"preempted.pth cannot be written: .*No space left .*free space"
    ):
        run(tmp_path, custom_hooks=[Signal()])


def test_run_continues_if_its_configuration_cannot_be_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logs, "write_text", full)
    assert run(tmp_path, cfg=dict(note="mine")).iter == 10


@pytest.mark.skipif(os.name != "posix", reason="other systems have no lock")
def test_lock_that_cannot_be_written_raises_an_error_with_the_path(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lock = FolderLock(tmp_path, pytest.fail)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # each write to a file fails
    try:
        with pytest.raises(ConfigError, match=r"work_dir: .*File too large.*check the free space") as error:
            lock.lock(tmp_path, "work_dir")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / ".lock") in str(error.value)
    lock.lock(tmp_path, "work_dir")
    lock.release()


@pytest.mark.parametrize("entry", ["first.weight", "norm.running_mean"])
def test_average_that_is_not_finite_is_not_saved(tmp_path, entry):
    class Spoil(Hook):
        def after_train_epoch(self, runner):
            if runner.epoch == 1:
                ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
                ema.ema_model.module.state_dict()[entry].fill_(float("nan"))

    with pytest.raises(NonFiniteLossError, match=rf"average of the \w+.* '{entry}' is NaN .* iteration 10"):
        run(
            tmp_path,
            model=Net(norm=True),
            custom_hooks=[dict(type="EMAHook", update_buffers=True), Spoil()],
            default_hooks=dict(checkpoint=CHECKPOINTS),
        )
    assert torch.load(tmp_path / "epoch_1.pth")["state_dict"][entry].isfinite().all()
