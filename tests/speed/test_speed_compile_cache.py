"""Compiled code is cached in a private folder, and a second process reuses it."""

import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.speed.compile_cache import cache_folder, use_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def private_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # monkeypatch restores the variable after the test
    monkeypatch.delenv(VARIABLE)


def test_cache_folder_is_private_and_set_for_torch(tmp_path):
    folder = use_cache(True, pytest.fail)
    assert folder.parent == tmp_path / "cache" / "compile"
    assert os.environ[VARIABLE] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert use_cache(True, pytest.fail) == folder


def test_cache_folder_depends_on_the_versions(monkeypatch):
    folder = cache_folder(True)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert cache_folder(True) != folder


def test_no_cache_folder_if_the_cache_is_disabled(tmp_path):
    assert use_cache(False, pytest.fail) is None
    assert VARIABLE not in os.environ
    assert not (tmp_path / "cache").exists()


# ---- unsafe or read-only folders ---------------------------------------------------------------------


def test_folder_writable_by_others_is_not_used(tmp_path):
    folder = use_cache(True, pytest.fail)
    del os.environ[VARIABLE]
    folder.chmod(0o770)
    warnings = []
    assert use_cache(True, warnings.append) is None
    assert VARIABLE not in os.environ
    assert len(warnings) == 1
    assert f"{folder} belongs to another user or is writable by other users" in warnings[0]


def test_folder_that_cannot_be_created_warns_once_or_raises_an_error_if_configured(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(file))
    warnings = []
    assert use_cache(True, warnings.append) is None
    assert len(warnings) == 1
    assert "Set SLIPSTREAM_CACHE to a different folder" in warnings[0]
    with pytest.raises(ConfigError, match=r"compile.cache: .*file"):
        use_cache(str(file), pytest.fail)


# ---- second start ------------------------------------------------------------------------------------

START = """
import sys
import torch
from torch import nn
from slipstream.speed.compile import CompileOptions
from slipstream.speed.compiled_modules import compile_model
from slipstream.speed.compile_cache import use_cache

torch.manual_seed(0)
model = nn.Linear(3, 2)
how = CompileOptions()
use_cache(True, sys.exit)
compile_model(model, how, sys.exit)
model(torch.ones(4, 3)).relu().sum().backward()
counts = torch._dynamo.utils.counters["inductor"]
print(counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"], model.weight.grad.tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor requires a C++ compiler")
def test_second_process_finds_the_cached_code(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    cold, warm = (
        subprocess.run(
            [sys.executable, "-c", START],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout.split(maxsplit=2)
        for _ in range(2)
    )
    assert (int(cold[0]), int(cold[1])) == (0, 2)  # forward and backward
    assert (int(warm[0]), int(warm[1])) == (2, 0)
    assert warm[2] == cold[2]
    assert len(list((tmp_path / "cache" / "compile").iterdir())) == 1
