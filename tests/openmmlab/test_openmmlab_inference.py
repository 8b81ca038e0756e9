"""Inferencers, the hub and model analysis have MMEngine's semantics."""

import json
import math
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.analysis import (
    ActivationAnalyzer,
    FlopAnalyzer,
    activation_count,
    flop_count,
    get_model_complexity_info,
    parameter_count,
    parameter_count_table,
)
from mmengine.analysis.print_helper import _format_size
from mmengine.config import Config
from mmengine.hub import get_config, get_model
from mmengine.infer import BaseInferencer
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from slipstream.errors import CheckpointError, ConfigError


@MODELS.register_module()
class Brightness(BaseModel):
    def __init__(self, scale=1.0, pretrained=None, data_preprocessor=None):
        super().__init__(data_preprocessor)
        assert pretrained is None, "the inferencer did not remove `pretrained`"
        self.scale = nn.Parameter(torch.tensor(scale))
        self.batches = []

    def forward(self, inputs, mode="tensor"):
        self.batches.append(len(inputs))
        return [self.scale * item.float().mean() for item in inputs]


class BrightnessInferencer(BaseInferencer):
    preprocess_kwargs: ClassVar = {"offset"}
    visualize_kwargs: ClassVar = {"color"}
    postprocess_kwargs: ClassVar = {"digits"}

    def _init_pipeline(self, cfg):
        def read(item):
            values = np.loadtxt(item) if isinstance(item, str) else item
            return {"inputs": torch.as_tensor(values)}

        return read

    def preprocess(self, inputs, batch_size=1, offset=0):
        return super().preprocess([self._shift(item, offset) for item in inputs], batch_size)

    def _shift(self, item, offset):
        return item + offset if offset else item

    def visualize(self, inputs, preds, show=False, color=None):
        return None if color is None else [f"{color} {len(inputs)}" for _ in preds]

    def postprocess(self, preds, visualization, return_datasample=False, digits=3):
        values = preds if return_datasample else [round(value.item(), digits) for value in preds]
        return {"predictions": values, "visualization": visualization}


MODEL = dict(model=dict(type="Brightness", scale=2.0, pretrained="unused.pth"))


def inferencer(**kwargs):
    with pytest.warns(UserWarning, match="the model's weights are randomly initialized"):
        return BrightnessInferencer(model=MODEL, scope="mmengine", show_progress=False, **kwargs)


def test_arrays_files_lists_and_folders_are_valid_inputs(tmp_path):
    infer = inferencer()
    array = np.array([1.0, 2.0])
    for name, values in (("b.txt", array + 1), ("a.txt", array)):
        np.savetxt(tmp_path / name, values)
    assert infer(array)["predictions"] == [3.0]
    assert infer(torch.tensor([4.0]))["predictions"] == [8.0]
    assert infer(str(tmp_path / "a.txt"))["predictions"] == [3.0]
    assert infer([str(tmp_path / "b.txt"), array])["predictions"] == [5.0, 3.0]
    assert sorted(infer(str(tmp_path))["predictions"]) == [3.0, 5.0]


def test_inputs_are_batched_and_arguments_are_passed_to_their_stage():
    infer = inferencer()
    assert not infer.model.training
    arrays = [np.full(2, float(i)) for i in range(5)]
    result = infer(arrays, batch_size=2, offset=1, color="red", digits=0)
    assert result == {"predictions": [2, 4, 6, 8, 10], "visualization": ["red 5"] * 5}
    assert infer.model.batches == [2, 2, 1]
    samples = infer(arrays[1], return_datasamples=True)["predictions"]
    assert isinstance(samples[0], torch.Tensor)
    assert not samples[0].requires_grad
    with pytest.raises(ValueError, match=r"does not accept the arguments \['colour'\]"):
        infer(arrays, colour="red")


def test_an_argument_cannot_belong_to_two_stages():
    with pytest.raises(AssertionError, match="'color' in preprocess_kwargs and visualize_kwargs"):
        type("Wrong", (BrightnessInferencer,), {"preprocess_kwargs": {"color"}})


def test_a_progress_bar_counts_the_batches(capsys):
    with pytest.warns(UserWarning, match="random"):
        infer = BrightnessInferencer(model=MODEL)
    infer([np.ones(2)] * 3, batch_size=2)
    assert "2/2" in capsys.readouterr().out


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
    with pytest.raises(ConfigError, match="weights: is required"):
        BrightnessInferencer()


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
    with pytest.raises(
        ConfigError, match=r"'dark' is neither a file nor a model in the metafiles of mmrazor"
    ):
        BrightnessInferencer("dark", scope=library)
    with pytest.raises(ConfigError, match="requires the package 'mmflow'"):
        BrightnessInferencer("dark", scope="mmflow")


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
    with pytest.raises(ConfigError, match=r"no configuration 'bright/b\.py'"):
        get_config("mmrazor::bright/b.py")
    with pytest.raises(ConfigError, match="'torch' is not one of"):
        get_config("torch::bright/b.py")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.layer = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.pool(self.up(F.relu(self.norm(self.conv(x)))))
        x = self.fc(self.layer(x.flatten(2)))
        return x @ x.transpose(1, 2)


# By hand, for one input of shape 3 x 16 x 16. A multiply-add counts as one operation. Each value counts as 2 operations
# in batch norm (in evaluation mode), 4 in bilinear upsampling, 1 in pooling, and 5 in layer norm.
FLOPS = {
    "conv": 8 * 8 * 8 * 27,
    "norm": 2 * 8 * 8 * 8,
    "up": 4 * 8 * 16 * 16,
    "pool": 8 * 16 * 16,
    "layer": 5 * 8 * 16,
    "fc": 8 * 16 * 5,
    "unused": 0,
}
PRODUCT = 8 * 5 * 8
ACTIVATIONS = {"conv": 8 * 8 * 8, "fc": 8 * 5}
PARAMS = 8 * 27 + 8 + 16 + 32 + 85 + 6


def test_operations_activations_and_parameters_are_counted_per_module():
    model = Small().eval()
    inputs = torch.randn(1, 3, 16, 16)
    flops = FlopAnalyzer(model, inputs)
    assert {name: flops.total(name) for name in FLOPS} == FLOPS
    assert flops.total() == sum(FLOPS.values()) + PRODUCT
    assert flops.by_operator("conv") == Counter({"conv": FLOPS["conv"]})
    assert flops.by_module()["norm"] == FLOPS["norm"]
    acts = ActivationAnalyzer(model, (inputs,))
    assert {name: count for name, count in acts.by_module().items() if count and name} == ACTIVATIONS
    assert acts.total() == sum(ACTIVATIONS.values()) + 64
    assert sum(flop_count(model, (inputs,))[0].values()) == pytest.approx(flops.total() / 1e9)
    assert sum(activation_count(model, (inputs,))[0].values()) == pytest.approx(acts.total() / 1e6)
    assert parameter_count(model)["fc"] == 85
    with pytest.raises(ConfigError, match="no module 'head'"):
        flops.total("head")


def test_the_summary_contains_numbers_a_table_and_the_structure():
    info = get_model_complexity_info(Small().eval(), (3, 16, 16))
    assert (info["flops"], info["params"]) == (sum(FLOPS.values()) + PRODUCT, PARAMS)
    assert info["flops_str"] == "26.688K"
    assert "conv" in info["out_table"]
    assert "(8, 3, 3, 3)" in info["out_table"]
    assert "(conv): Conv2d(3, 8, kernel_size=(3, 3)" in info["out_arch"]
    assert "#flops: 13.824K" in info["out_arch"]
    bare = get_model_complexity_info(
        Small().eval(), inputs=torch.ones(1, 3, 16, 16), show_table=False, show_arch=False
    )
    assert (bare["out_table"], bare["out_arch"]) == ("", "")
    assert "fc.weight" in parameter_count_table(Small())
    for arguments in ({}, {"input_shape": (1,), "inputs": torch.ones(1)}, {"input_shape": (1.5,)}):
        with pytest.raises(ConfigError, match="input_shape"):
            get_model_complexity_info(Small(), **arguments)


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (101, "0.101K"), (25_600_000, "25.6M"), (4 * 10**9, "4G"), (3 * 10**12, "3T")],
)
def test_sizes_are_formatted_with_units(value, text):
    assert _format_size(value) == text


ORACLE = """
import sys; sys.path.insert(0, sys.argv[1])
import json, torch
from test_openmmlab_inference_model import Small
from mmengine.analysis import get_model_complexity_info
info = get_model_complexity_info(Small().eval(), (3, 16, 16), show_table=False, show_arch=False)
print("RESULT " + json.dumps([info["flops"], info["activations"], info["params"]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not any(metadata.distributions(name="mmengine")), reason="MMEngine is not installed")
def test_the_counts_equal_those_that_mmengine_returns(tmp_path):
    source = Path(__file__).read_text()
    start, end = source.index("class Small"), source.index("# By hand, for one")
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
    (tmp_path / "test_openmmlab_inference_model.py").write_text(head + source[start:end])
    command = [sys.executable, "-c", ORACLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.split("RESULT ")[1])
    info = get_model_complexity_info(Small().eval(), (3, 16, 16))
    assert counts == [info["flops"], info["activations"], info["params"]]
    assert math.prod(counts) > 0
