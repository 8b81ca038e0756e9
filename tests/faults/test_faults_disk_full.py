"""A run on a full disk ends with an error that identifies the disk. After space is freed, the run resumes correctly."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.files import check_space, disk_problem

SCRIPT = Path(__file__).with_name("disk_full.py")
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def require_mounts(folder):
    """Skip the test if the user is not allowed to mount file systems. In continuous integration, fail instead if the
    user is root."""
    if shutil.which("unshare") is None:
        pytest.skip("requires unshare from util-linux")
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        strict = os.environ.get("SLIPSTREAM_CI") and os.geteuid() == 0
        (pytest.fail if strict else pytest.skip)(
            "requires permission to mount file systems in a user namespace"
        )


@pytest.mark.slow
def test_run_on_a_full_disk_names_the_disk_and_resumes_after_space_is_free(tmp_path):
    require_mounts(tmp_path)
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    command = [*NAMESPACE, sys.executable, str(SCRIPT), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert "epoch_3.pth cannot be written: the disk containing" in found["error"]
        assert f"{found['folder']} is full (0 MiB of 8 MiB is free)" in found["error"]
        assert found["kept"] == ["epoch_1.pth", "epoch_2.pth"]
        assert found["temporary"] == []
        assert found["resumed_from"] == "epoch_2.pth"
        assert found["logged"] == list(range(11, 21))
    assert "Traceback" not in done.stderr + done.stdout


def test_only_a_full_disk_is_reported_as_such(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    check_space(file)
    assert file.stat().st_size > 1
    full = disk_problem(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert full.startswith(f"the disk containing {tmp_path} is full (")
    assert full.endswith(" MiB is free)")
    quota = disk_problem(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)
    assert quota == f"the disk quota for {tmp_path} is exceeded"
    assert disk_problem(OSError(13, "Permission denied"), tmp_path) is None
    assert disk_problem(ValueError(28), tmp_path) is None
