"""Inferencers and the hub execute no code from checkpoints, and install no packages."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hub import get_config, get_model
from mmengine.infer import BaseInferencer
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from slipstream.errors import CheckpointError, MissingPackageError


@MODELS.register_module()
class Brightness(BaseModel):
    def __init__(self, scale=1.0, pretrained=None, data_preprocessor=None):
        super().__init__(data_preprocessor)
        assert pretrained is None, "the inferencer did not remove `pretrained`"
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, inputs, mode="tensor"):
        return [self.scale * item.float().mean() for item in inputs]


class BrightnessInferencer(BaseInferencer):
    def _init_pipeline(self, cfg):
        return lambda item: {"inputs": torch.as_tensor(item)}

    def visualize(self, inputs, preds, show=False):
        return None

    def postprocess(self, preds, visualization, return_datasample=False):
        return {"predictions": [round(value.item(), 3) for value in preds]}


MODEL = dict(model=dict(type="Brightness", scale=2.0, pretrained="unused.pth"))


def test_the_configuration_comes_from_the_checkpoint_or_a_file(tmp_path):
    weights = {
        "state_dict": {"scale": torch.tensor(7.0)},
        "meta": {"cfg": "model = dict(type='Brightness')\n"},
    }
    torch.save(weights, tmp_path / "model.pth")
    infer = BrightnessInferencer(weights=str(tmp_path / "model.pth"), show_progress=False)
    assert infer(np.ones(2))["predictions"] == [7.0]
    (tmp_path / "config.py").write_text(f"model = {MODEL['model']}\n")
    infer = BrightnessInferencer(
        str(tmp_path / "config.py"), str(tmp_path / "model.pth"), show_progress=False
    )
    assert infer(np.ones(2))["predictions"] == [7.0]
    torch.save({"state_dict": {}, "meta": {"cfg": "import os\n"}}, tmp_path / "hostile.pth")
    with pytest.raises(CheckpointError, match="cannot be read"):
        BrightnessInferencer(weights=str(tmp_path / "hostile.pth"))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Create an importable library with a metafile and weights, and yield its name."""
    folder = tmp_path / "site/mmrazor"
    configs = folder / ".mim/configs/bright"
    configs.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "utils.py").write_text("def register_all_modules(): calls.append(1)\ncalls = []\n")
    (configs / "bright-a.py").write_text("model = dict(type='Brightness', scale=1.0)\n")
    torch.save({"state_dict": {"scale": torch.tensor(3.0)}}, tmp_path / "a.pth")
    entry = {"Name": "Bright-A", "Alias": ["bright"], "Config": "configs/bright/bright-a.py"}
    metafile = {"Models": [{**entry, "Weights": str(tmp_path / "a.pth")}]}
    (configs / "metafile.yml").write_text(json.dumps(metafile))
    (folder / ".mim/model-index.yml").write_text("Import:\n- configs/bright/metafile.yml\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield "mmrazor"
    for name in [name for name in sys.modules if name.split(".")[0] == "mmrazor"]:
        del sys.modules[name]


def test_a_model_is_found_by_its_name_in_the_metafile(library):
    for name in ("bright-a", "BRIGHT"):
        infer = BrightnessInferencer(name, scope=library, show_progress=False)
        assert infer(np.ones(2))["predictions"] == [3.0]
    assert BrightnessInferencer.list_models(library) == ["Bright-A", "bright"]
    assert BrightnessInferencer.list_models(library, "bri") == ["bright"]
    with pytest.raises(ValueError, match="Cannot find model: dark in mmrazor"):
        BrightnessInferencer("dark", scope=library)


def test_the_hub_returns_configurations_and_models(library, tmp_path):
    cfg = get_config("mmrazor::bright/bright-a.py", pretrained=True)
    assert isinstance(cfg, Config)
    assert cfg.to_dict() == {
        "model": {"type": "Brightness", "scale": 1.0},
        "model_path": str(tmp_path / "a.pth"),
    }
    assert get_model("mmrazor::bright/bright-a.py").scale == 1
    assert get_model("mmrazor::bright/bright-a.py", pretrained=True).scale == 3
    assert sys.modules["mmrazor.utils"].calls == [1, 1]
    with pytest.raises(MissingPackageError, match="'mmflow' is not installed"):
        get_config("mmflow::bright/b.py")


def test_checkpoints_are_read_without_executing_code(tmp_path):
    from mmengine.runner import CheckpointLoader, load_checkpoint

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"state_dict": {}, "x": Attack()}, tmp_path / "attack.pth")
    for read in (
        lambda path: CheckpointLoader.load_checkpoint(path),
        lambda path: load_checkpoint(nn.Linear(1, 1), path),
        lambda path: CheckpointLoader.load_checkpoint(f"s3:/{path}"),
    ):
        with pytest.raises(CheckpointError):
            read(str(tmp_path / "attack.pth"))
    assert not (tmp_path / "executed").exists()
    layer = nn.Linear(2, 1)
    torch.save(
        {"state_dict": {f"module.{k}": v + 1 for k, v in layer.state_dict().items()}}, tmp_path / "a.pth"
    )
    loaded = nn.Linear(2, 1)
    load_checkpoint(loaded, str(tmp_path / "a.pth"))
    assert torch.equal(loaded.weight, layer.weight + 1)
