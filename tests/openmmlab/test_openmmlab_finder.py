"""Test that imports of `mmengine` and its submodules import Slipstream only after an explicit opt-in."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import MissingPackageError
from slipstream.openmmlab import finder

SRC = str(Path(__file__).parents[2] / "src")


def run(*arguments, code=0, path=""):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, str(path)])}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_redirection_replaces_the_training_modules_and_keeps_the_others():
    program = (
        "import slipstream.openmmlab, mmengine\n"
        "from mmengine.runner.loops import ValLoop\n"
        "from mmengine.structures import InstanceData\n"
        "print(ValLoop.__module__, InstanceData.__module__, mmengine.Config.__module__)\n"
    )
    done = run("-c", program)
    assert done.stdout.split()[-3:] == [
        "slipstream.runner.loops",
        "mmengine.structures.instance_data",
        "mmengine.config.config",
    ]
    assert (done.stdout + done.stderr).count("`import mmengine` now imports Slipstream") == 1


def test_importing_only_slipstream_does_not_replace_mmengine():
    done = run("-c", "import slipstream.runner; from mmengine.runner import Runner; print(Runner.__module__)")
    assert done.stdout.strip() == "mmengine.runner.runner"


def test_an_imported_mmengine_is_not_replaced():
    done = run("-c", "import mmengine, slipstream.openmmlab", code=1)
    assert "mmengine is already imported; import slipstream.openmmlab before it" in done.stderr


def test_error_names_the_extra_if_mmengine_is_not_installed(monkeypatch):
    monkeypatch.setattr(finder, "_installed", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'slipstream\[openmmlab\]'"):
        finder.install()


def test_names_and_modules_that_do_not_exist_raise_an_import_error():
    with pytest.raises(ImportError, match="ApexOptimWrapper"):
        from mmengine.optim import ApexOptimWrapper  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"no module mmengine\.nothing"):
        importlib.import_module("mmengine.nothing")


def test_a_script_runs_with_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "helper.py").write_text("name = 'found'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper\nfrom mmengine.runner import Runner\n"
        "print(sys.argv[1:], helper.name, Runner.__module__, __name__)\n"
    )
    done = run("-m", "slipstream.openmmlab", script, "--lr", "1")
    assert done.stdout.splitlines()[-1] == "['--lr', '1'] found slipstream.openmmlab.runner __main__"


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_import_slipstream(tmp_path, context):
    (tmp_path / "parts.py").write_text(
        "import mmengine.hooks\n"
        "from mmengine.dataset import BaseDataset\n"
        "class Names(BaseDataset):\n"
        "    def load_data_list(self): return [{}]\n"
        "    def __getitem__(self, index): return mmengine.hooks.Hook.__module__\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import mmengine, parts\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        f"    print(*DataLoader(parts.Names(), num_workers=1, multiprocessing_context={context!r}))\n"
    )
    done = run("-m", "slipstream.openmmlab", script)
    assert done.stdout.splitlines()[-1] == "['slipstream.hooks.hook']"
