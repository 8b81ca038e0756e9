"""Test that imports of `mmengine` and its submodules import Slipstream only after an explicit opt-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = str(Path(__file__).parents[2] / "src")


def run(*arguments, path=(), code=0):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *map(str, path)])}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def fake_mmengine(folder):
    (folder / "mmengine").mkdir()
    (folder / "mmengine/__init__.py").write_text("__version__ = 'installed'\n")
    return folder


def test_the_package_replaces_an_installed_mmengine_and_prints_a_message(tmp_path):
    program = (
        "import slipstream.openmmlab, mmengine, mmengine.structures\n"
        "from mmengine.structures import InstanceData\n"
        "from mmengine.structures import InstanceData as Own\n"
        "assert InstanceData is Own and mmengine.structures.__spec__.name.startswith('slipstream')\n"
        "print(mmengine.__version__)\n"
    )
    done = run("-c", program, path=[fake_mmengine(tmp_path)])
    assert done.stdout.split()[-1] == "0.10.7"
    assert (done.stdout + done.stderr).count("`import mmengine` now imports Slipstream") == 1


def test_importing_only_slipstream_does_not_replace_mmengine(tmp_path):
    program = "import slipstream, slipstream.runner, mmengine; print(mmengine.__version__)"
    assert run("-c", program, path=[fake_mmengine(tmp_path)]).stdout.strip() == "installed"


def test_an_imported_mmengine_is_not_replaced(tmp_path):
    done = run("-c", "import mmengine, slipstream.openmmlab", path=[fake_mmengine(tmp_path)], code=1)
    assert "mmengine is already imported from" in done.stderr
    assert "import slipstream.openmmlab before mmengine" in done.stderr


def test_import_error_names_a_missing_module():
    done = run("-c", "import slipstream.openmmlab, mmengine._strategy", code=1)
    assert "mmengine._strategy is not part of Slipstream's replacement for MMEngine" in done.stderr


def test_a_script_runs_with_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "helper.py").write_text("name = 'found'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper, mmengine\nprint(sys.argv[1:], helper.name, mmengine.__name__, __name__)\n"
    )
    done = run("-m", "slipstream.openmmlab", script, "--lr", "1")
    assert done.stdout.splitlines()[-1] == "['--lr', '1'] found mmengine __main__"


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_import_slipstream(tmp_path, context):
    (tmp_path / "parts.py").write_text(
        "import mmengine\n"
        "from mmengine.dataset import BaseDataset\n"
        "class Names(BaseDataset):\n"
        "    def load_data_list(self): return [{}]\n"
        "    def __getitem__(self, index): return mmengine.__name__\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import mmengine, parts\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        f"    print(*DataLoader(parts.Names(), num_workers=1, multiprocessing_context={context!r}))\n"
    )
    (tmp_path / "installed").mkdir()
    done = run("-m", "slipstream.openmmlab", script, path=[fake_mmengine(tmp_path / "installed")])
    assert done.stdout.splitlines()[-1] == "['mmengine']"


def test_a_missing_script_prints_a_one_line_error():
    done = run("-m", "slipstream.openmmlab", "nowhere.py", code=1)
    assert done.stderr.splitlines()[-1].startswith("error: 'nowhere.py' is not a file; use python -m")


@pytest.mark.parametrize("opt_in", [True, False])
def test_the_command_requires_the_environment_variable(tmp_path, monkeypatch, opt_in):
    (tmp_path / "parts.py").write_text(
        "import torch, mmengine\n"
        "from mmengine.model import BaseModel\n"
        "from mmengine.registry import DATASETS, MODELS\n"
        "@DATASETS.register_module()\n"
        "def Ones(): return [{'inputs': torch.ones(2)}] * 4\n"
        "@MODELS.register_module()\n"
        "class Sum(BaseModel):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(2))\n"
        "    def forward(self, inputs, mode):\n"
        "        assert isinstance(inputs, list), 'pseudo_collate did not return a list'\n"
        "        return {'loss': (self.scale * inputs[0]).sum()}\n"
    )
    (tmp_path / "config.py").write_text(
        "custom_imports = dict(imports=['parts'])\n"
        f"work_dir = {str(tmp_path / 'work')!r}\n"
        "model = dict(type='Sum')\n"
        "train_dataloader = dict(batch_size=2, dataset=dict(type='Ones'))\n"
        "train_cfg = dict(by_epoch=True, max_epochs=1)\n"
        "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))\n"
        "default_scope = 'mmengine'\n"
    )
    if opt_in:
        monkeypatch.setenv("SLIPSTREAM_OPENMMLAB", "1")
    done = run(
        "-m",
        "slipstream",
        "train",
        tmp_path / "config.py",
        path=[fake_mmengine(tmp_path)],
        code=0 if opt_in else 2,
    )
    text = done.stdout + done.stderr
    assert ("`import mmengine` now imports Slipstream" in text) == opt_in
    assert ("Saved checkpoint" in text) == opt_in
