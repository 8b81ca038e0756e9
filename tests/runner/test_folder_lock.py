"""Test that two runs cannot write to the same folder at the same time."""

import os
import signal
import subprocess
import sys

import pytest

from slipstream.errors import ConfigError
from slipstream.hooks import ProgressBarHook
from slipstream.runner.folder_lock import FolderLock
from tiny_runs import run

HOLD = """
import sys, time
from pathlib import Path
from slipstream.runner.folder_lock import FolderLock
lock = FolderLock(sys.argv[1], print)
lock.lock(Path(sys.argv[1]), "work_dir")
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_second_run_is_refused_until_the_first_is_killed(tmp_path, holder):
    (tmp_path / "epoch_1.pth").write_text("of the first run")
    with pytest.raises(ConfigError, match=rf"work_dir: .* is in use by process {holder.pid} on ") as error:
        run(tmp_path)
    assert "choose another folder" in str(error.value)
    assert (tmp_path / "epoch_1.pth").read_text() == "of the first run"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    run(tmp_path)


def test_run_removes_temporary_files_of_killed_runs(tmp_path):
    left = [
        tmp_path / name
        for name in (".epoch_1.pth.0123abcd.tmp", ".epoch_1.sharded.tmp", ".epoch_2.sharded.old")
    ]
    left[0].write_text("half")
    left[1].mkdir()
    left[2].mkdir()
    (tmp_path / "epoch_2.sharded").mkdir()  # replaced the `.old` folder
    only_copy = tmp_path / ".epoch_3.sharded.old"
    only_copy.mkdir()
    lock = FolderLock(tmp_path, pytest.fail)
    lock.lock(tmp_path, "work_dir")
    lock.release()
    assert not any(path.exists() for path in left)
    assert only_copy.exists()


class FailingRelease(ProgressBarHook):
    def release(self, runner):
        raise RuntimeError("cannot close")


def test_lock_is_released_if_a_hook_fails(tmp_path):
    with pytest.raises(RuntimeError, match="cannot close"):
        run(tmp_path, custom_hooks=[FailingRelease()])
    run(tmp_path)
