"""Compiled code is cached in a private folder, and a second process reuses it."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.speed.compile import CompileOptions
from slipstream.speed.compile_cache import cache_folder, set_cache_folder, use_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def private_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # monkeypatch restores the variable after the test
    monkeypatch.delenv(VARIABLE)


def net(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def test_cache_folder_is_private_and_set_for_torch(tmp_path):
    folder = use_cache(net(), CompileOptions(), "plan", pytest.fail)
    assert folder.parent == tmp_path / "cache" / "compile"
    assert folder.name.startswith("Sequential-")
    assert os.environ[VARIABLE] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert use_cache(net(), CompileOptions(), "plan", pytest.fail) == folder


def test_default_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(net(), CompileOptions(), "").parent == tmp_path / "slipstream" / "compile"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        folder = cache_folder(net(), CompileOptions(), "")
        assert folder.parent == tmp_path / "home" / ".cache" / "slipstream" / "compile"


def test_configured_cache_folder_is_used(tmp_path):
    folder = use_cache(net(), CompileOptions(cache=str(tmp_path / "mine")), "", pytest.fail)
    assert folder.parent == tmp_path / "mine"


def test_cache_folder_depends_on_model_plan_and_versions(monkeypatch):
    how = CompileOptions()
    folder = cache_folder(net(), how, "plan")
    with torch.no_grad():
        trained = net()
        trained[0].weight.add_(1)
    assert cache_folder(trained, how, "plan") == folder
    others = {
        cache_folder(net(5), how, "plan"),
        cache_folder(net().double(), how, "plan"),
        cache_folder(net(), CompileOptions(dynamic=True), "plan"),
        cache_folder(net(), how, "another plan"),
    }
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    others.add(cache_folder(net(), how, "plan"))
    assert len(others | {folder}) == 6


def test_cache_folder_ignores_addresses_of_functions():
    plans = [[lambda: None], [lambda: None]]
    assert repr(plans[0]) != repr(plans[1])
    folders = {cache_folder(net(), CompileOptions(), plan) for plan in plans}
    assert len(folders) == 1


@pytest.mark.parametrize("how", [CompileOptions(cache=False), CompileOptions("aot_eager")])
def test_no_cache_folder_without_cache_or_inductor(how, tmp_path):
    assert use_cache(net(), how, "", pytest.fail) is None
    assert VARIABLE not in os.environ
    assert not (tmp_path / "cache").exists()


def test_cache_folder_set_by_the_user_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert use_cache(net(), CompileOptions(), "", pytest.fail) is None
    assert os.environ[VARIABLE] == str(tmp_path)


def test_second_model_in_a_process_has_a_separate_folder(monkeypatch):
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(VARIABLE, default_cache_dir())  # torch sets this default at the first compilation
    first = use_cache(net(), CompileOptions(), "", pytest.fail)
    second = use_cache(net(5), CompileOptions(), "", pytest.fail)
    assert len({first, second, None}) == 3
    assert os.environ[VARIABLE] == str(second)


# ---- unsafe or read-only folders ---------------------------------------------------------------------


def test_folder_writable_by_others_is_not_used(tmp_path):
    folder = use_cache(net(), CompileOptions(), "", pytest.fail)
    del os.environ[VARIABLE]
    folder.chmod(0o770)
    warnings = []
    assert use_cache(net(), CompileOptions(), "", warnings.append) is None
    assert VARIABLE not in os.environ
    assert len(warnings) == 1
    assert f"{folder} is writable by other users; refusing to load compiled code from it" in warnings[0]


def test_folder_of_another_user_is_not_used(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    warnings = []
    assert use_cache(net(), CompileOptions(), "", warnings.append) is None
    assert "belongs to another user" in warnings[0]


def test_folder_that_cannot_be_created_warns_once_or_raises_an_error_if_configured(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(file))
    warnings = []
    assert use_cache(net(), CompileOptions(), "", warnings.append) is None
    assert len(warnings) == 1
    assert "Set SLIPSTREAM_CACHE to a different folder" in warnings[0]
    with pytest.raises(ConfigError, match=r"compile.cache: .*file"):
        use_cache(net(), CompileOptions(cache=str(file)), "", pytest.fail)


# ---- second start ------------------------------------------------------------------------------------

START = """
import sys
import torch
from torch import nn
from slipstream.speed.compile import CompileOptions, compile_model
from slipstream.speed.compile_cache import use_cache
from slipstream.speed.compile_report import CompileReport

torch.manual_seed(0)
model = nn.Linear(3, 2)
how = CompileOptions()
use_cache(model, how, "", sys.exit)
compile_model(model, how, sys.exit)
report = CompileReport()
report.start()
model(torch.ones(4, 3)).relu().sum().backward()
summary = report.finish()
print(summary.cache_hits, summary.cache_misses, model.weight.grad.tolist())
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


@pytest.mark.parametrize("others", [None, "elsewhere"])
def test_step_compiles_into_the_folder_of_its_run(monkeypatch, others):
    monkeypatch.delenv(VARIABLE, raising=False)
    if others is not None:
        monkeypatch.setenv(VARIABLE, others)
    with set_cache_folder("own"):
        assert os.environ[VARIABLE] == "own"
    assert os.environ.get(VARIABLE) == others
    with set_cache_folder(None):
        assert os.environ.get(VARIABLE) == others
