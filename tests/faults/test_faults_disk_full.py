"""A run on a full disk ends with an error that identifies the disk. After space is freed, the run resumes correctly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        assert "epoch_3.pth cannot be written" in found["error"]
        assert "No space left on device" in found["error"]
        assert found["kept"] == ["epoch_1.pth", "epoch_2.pth"]
        assert found["temporary"] == []
        assert found["resumed_from"] == "epoch_2.pth"
        assert found["logged"] == list(range(11, 21))
    assert "Traceback" not in done.stderr + done.stdout
