"""Test that the GPU tests can be collected without the optional libraries, as `make gpu` requires."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKER = """
from importlib.machinery import PathFinder

MISSING = {"hydra", "omegaconf", "pytorch_optimizer", "tomli_w", "mypy", "lightning"}
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name.partition(".")[0] in MISSING else find_spec(name, *args)
"""


@pytest.mark.slow
def test_gpu_tests_are_collected_without_optional_libraries(tmp_path, monkeypatch):
    (tmp_path / "blocker.py").write_text(BLOCKER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    root = Path(__file__).parents[1]
    # Select the same files as .ci/gpu. They include this file, which contains "mark.gpu" but no GPU tests.
    files = [
        path for path in root.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [
        sys.executable,
        *["-m", "pytest", "-p", "blocker", "-p", "no:hydra_pytest", "--collect-only", "-m", "gpu"],
        *files,
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_on_gpu_graph.py" in done.stdout
