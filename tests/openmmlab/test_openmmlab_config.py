"""Configurations that MMEngine reads are converted, and those in checkpoints are read without executing them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, OPTIMIZERS

from slipstream.config import Config as OwnConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.openmmlab.config import load_config, own_config, saved_config

SRC = str(Path(__file__).parents[2] / "src")


def python_style(folder):
    (folder / "base.py").write_text("from torch.optim import SGD\noptimizer = dict(type=SGD, lr=0.5)\n")
    (folder / "config.py").write_text(
        "from mmengine.config import read_base\nwith read_base():\n    from .base import *\n"
        "import torch\nfrom torch.nn import ReLU\n"
        "layers = [ReLU, dict(type=ReLU, inplace=True)]\ndtype = torch.float16\noptimizer.update(dict(lr=0.1))\n"
    )
    return folder / "config.py"


def test_the_objects_of_a_python_style_configuration_are_imported_when_it_is_converted(tmp_path):
    path = python_style(tmp_path)
    for cfg in (own_config(Config.fromfile(path)), load_config(path)):
        assert type(cfg) is OwnConfig
        assert cfg.to_dict() == {
            "optimizer": {"type": torch.optim.SGD, "lr": 0.1},
            "layers": [torch.nn.ReLU, {"type": torch.nn.ReLU, "inplace": True}],
            "dtype": torch.float16,
        }
        assert cfg.filename == str(path)
    (tmp_path / "written.py").write_text(cfg.pretty_text)
    written = load_config(tmp_path / "written.py")
    assert OPTIMIZERS.get(written.optimizer.type) is torch.optim.SGD


def test_other_configurations_are_loaded_as_data_or_returned_as_they_are(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {type: A}\n")
    assert load_config(tmp_path / "config.yaml").to_dict() == {"model": {"type": "A"}}
    (tmp_path / "config.py").write_text("_base_ = 'config.yaml'\nmodel = dict(depth=2)\n")
    assert load_config(tmp_path / "config.py").model == {"type": "A", "depth": 2}
    assert own_config(Config(dict(model=dict(type="A")))).to_dict() == {"model": {"type": "A"}}
    assert own_config(values := {"model": 1}) is values


def test_registries_build_from_mmengines_dicts_and_import_strings(tmp_path):
    cfg = Config.fromfile(python_style(tmp_path))
    optimizer = OPTIMIZERS.build({**cfg.optimizer, "params": [torch.nn.Parameter(torch.ones(2))]})
    assert type(optimizer) is torch.optim.SGD
    assert MODELS.build(ConfigDict(type="Linear", in_features=2, out_features=3)).weight.shape == (3, 2)
    assert OPTIMIZERS.get("torch.optim.SGD") is torch.optim.SGD
    for name in ("os.system", "torch.load", "slipstream.config.Config"):
        with pytest.raises(ConfigError, match="is not a registered"):
            OPTIMIZERS.build({"type": name})


def test_a_base_from_an_installed_library_has_the_scope_of_the_library(tmp_path, monkeypatch):
    target = tmp_path / "site/mmyolo/.mim/configs/a"
    target.mkdir(parents=True)
    (tmp_path / "site/mmyolo/__init__.py").write_text("")
    (target / "detector.py").write_text("model = dict(type='A', inner=dict(type='B'))\nnote = 'm'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "config.py").write_text("_base_ = ['mmyolo::a/detector.py']\nmodel = dict(depth=2)\n")
    expected = {"type": "A", "inner": {"type": "B"}, "_scope_": "mmyolo", "depth": 2}
    assert load_config(tmp_path / "config.py").to_dict() == {"model": expected, "note": "m"}


def test_the_configuration_in_a_checkpoint_is_read_without_executing_it(monkeypatch):
    python = "model = dict(type='A', sizes=[(1, -2.5)], no=None)\nlr = {'a': float('inf')}\n"
    assert saved_config({"meta": {"cfg": python}}) == {
        "model": {"type": "A", "sizes": [(1, -2.5)], "no": None},
        "lr": {"a": float("inf")},
    }
    yaml = "model:\n  type: A\n"
    hub = {"runtime_info": {"cfg": yaml}}
    assert saved_config({"message_hub": hub, "meta": {}}) == {"model": {"type": "A"}}
    for text in ("x = __import__('os').getcwd()\n", "import os\n", "x = [i for i in range(3)]\n"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            saved_config({"meta": {"cfg": text}})
    with pytest.raises(CheckpointError, match="does not contain a configuration"):
        saved_config({"meta": {}})
    monkeypatch.setenv("SECRET", "hidden")
    text = "model: {type: '{{ $SECRET }}'}\ncustom_imports: {imports: [nothing]}\n_base_: nothing.yaml\n"
    assert saved_config({"meta": {"cfg": text}})["model"] == {"type": "{{ $SECRET }}"}


def test_the_command_trains_with_a_python_style_configuration(tmp_path):
    (tmp_path / "parts.py").write_text(
        "import torch\n"
        "from mmengine.model import BaseModel\n"
        "def ones(): return [{'inputs': torch.ones(2)}] * 4\n"
        "class Sum(BaseModel):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(2))\n"
        "    def forward(self, inputs, mode):\n"
        "        return {'loss': (self.scale * inputs[0]).sum()}\n"
    )
    (tmp_path / "base.py").write_text(
        "from torch.optim import SGD\n"
        "optim_wrapper = dict(optimizer=dict(type=SGD, lr=0.1))\n"
        "train_cfg = dict(by_epoch=True, max_epochs=1)\n"
    )
    (tmp_path / "config.py").write_text(
        "from mmengine.config import read_base\n"
        "with read_base():\n"
        "    from .base import *\n"
        "from parts import Sum, ones\n"
        "from nowhere_to_be_found import unused\n"
        f"work_dir = {str(tmp_path / 'work')!r}\n"
        "model = dict(type=Sum)\n"
        "train_dataloader = dict(batch_size=2, dataset=dict(type=ones))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "config.py", "train_cfg.max_epochs=2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SRC, str(tmp_path)]), "SLIPSTREAM_OPENMMLAB": "1"},
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "work/epoch_2.pth").is_file()
    written = (tmp_path / "work/config.py").read_text()
    assert "type='parts.Sum'" in written
    assert "nowhere_to_be_found" not in written
