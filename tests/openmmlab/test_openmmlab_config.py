"""Test that pure Python style configurations behave as in MMEngine: objects are imported only when they are read."""

import copy
import json
import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.config.config_dict import LazyConfigDict
from mmengine.config.lazy import ConfigParsingError, LazyImportError, LazyObject
from mmengine.registry import MODELS, OPTIMIZERS

from slipstream.config import Config as OwnConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.openmmlab.config import saved_config

SRC = str(Path(__file__).parents[2] / "src")
SCRIPT = Path(__file__).parent / "scripts/read_config.py"

# The values of `child.py` in the script, computed by hand.
VALUES = {
    "channels": [1, 2, 4],
    "model": {
        "type": "torch.nn.Sequential",
        "act": {"type": "torch.nn.ReLU", "inplace": True},
        "norm": {"type": "torch.nn.BatchNorm2d", "eps": 1e-3},
        "widths": [1, 2, 4],
        "head": {"type": "Linear", "out": 4},
    },
    "length": 12,
    "optim_wrapper": {
        "type": "mmengine.optim.OptimWrapper",
        "optimizer": {"type": "torch.optim.AdamW", "lr": 0.001},
    },
    "train_cfg": {
        "max_epochs": 12,
        "dtype": "torch.float16",
        "hooks": [{"type": "torch.optim.AdamW", "k": 3}],
        "step0": 0,
        "step1": 1,
    },
    "i": 1,
}


def read(folder, *launcher):
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_a_script_written_for_mmengine_reads_a_python_style_configuration(tmp_path):
    result = read(tmp_path / "own", "-m", "slipstream.openmmlab")
    assert result["values"] == VALUES
    assert result["dumped"] == VALUES
    assert set(result["keys"]) == {*VALUES, "AdamW", "nn", "torch"}
    assert result["built"][2] == "torch.float16"
    assert result["diff"] == []


@pytest.mark.slow
@pytest.mark.skipif(not any(metadata.distributions(name="mmengine")), reason="MMEngine is not installed")
def test_the_values_equal_those_that_mmengine_reads(tmp_path):
    expected = read(tmp_path / "mmengine")
    result = read(tmp_path / "own", "-m", "slipstream.openmmlab")
    assert result["values"] == expected["values"]
    # MMEngine also returns the imported function `read_base`.
    assert result["keys"] == [key for key in expected["keys"] if key != "read_base"]
    assert result["dumped"] == expected["dumped"]
    assert result["built"][1:] == expected["built"][1:]


def config(folder, text, **files):
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "config.py").write_text(text)
    return Config.fromfile(folder / "config.py")


def test_an_object_is_imported_only_when_it_is_read(tmp_path):
    cfg = config(
        tmp_path,
        "from nowhere_to_be_found import Model\nimport missing_package.part\n"
        "model = dict(type=Model, depth=3)\nother = missing_package.part.thing\nlr = 0.1\n",
    )
    assert cfg.lr == 0.1
    assert cfg.model.depth == 3
    assert "nowhere_to_be_found.Model" in cfg.pretty_text
    assert "missing_package.part.thing" in cfg.pretty_text
    with pytest.raises(LazyImportError, match=r"importing nowhere_to_be_found failed.*config\.py, line 1"):
        _ = cfg.model.type
    with pytest.raises(ImportError, match="missing_package"):
        _ = cfg.other


def test_a_missing_name_is_reported_with_its_location(tmp_path):
    cfg = config(tmp_path, "from torch.nn import Conv7d\nmodel = dict(type=Conv7d)\n")
    with pytest.raises(
        LazyImportError, match=r"torch\.nn has no attribute 'Conv7d' \(.*config\.py, line 1\)"
    ):
        cfg.model.get("type")


def test_reading_copying_and_unpacking_return_the_imported_object(tmp_path):
    cfg = config(tmp_path, "from torch.nn import Linear\nmodel = dict(type=Linear, in_features=2)\n")
    for model in (
        cfg.model,
        copy.deepcopy(cfg).model,
        copy.copy(cfg.model),
        pickle.loads(pickle.dumps(cfg)).model,
    ):
        assert isinstance(model, ConfigDict)
        assert model == {"type": "torch.nn.Linear", "in_features": 2}
        assert {**model} == {"type": torch.nn.Linear, "in_features": 2}
        assert dict(model)["type"] is model["type"] is model.type is torch.nn.Linear
        assert next(iter(model.values())) is dict(model.items())["type"] is torch.nn.Linear
    layer = MODELS.build(cfg.model, default_args={"out_features": 3})
    assert layer.weight.shape == (3, 2)
    assert cfg.model.pop("type") is torch.nn.Linear
    assert "type" not in cfg.model


def test_a_written_configuration_builds_the_same_objects(tmp_path):
    cfg = config(tmp_path, "from torch.optim import SGD\noptimizer = dict(type=SGD, lr=0.5)\n")
    cfg.dump(tmp_path / "written.yaml")
    written = Config.fromfile(tmp_path / "written.yaml")
    assert written.optimizer == {"type": "torch.optim.SGD", "lr": 0.5}
    built = OPTIMIZERS.build({**written.optimizer, "params": [torch.nn.Parameter(torch.ones(2))]})
    assert type(built) is torch.optim.SGD


def test_an_import_string_of_an_object_that_is_not_registered_is_rejected():
    for name in ("os.system", "subprocess.Popen", "torch.load", "slipstream.config.Config"):
        assert OPTIMIZERS.get(name) is None
        with pytest.raises(ConfigError, match="is not a registered"):
            OPTIMIZERS.build({"type": name})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from torch.nn import *\n", r"config\.py:1: `from torch\.nn import \*` is only supported for base"),
        ("from torch import nn\nlayer = nn.Linear(2, 3)\n", r"config\.py:2.*write dict\(type=Linear"),
        ("import torch\nwith open('x') as f:\n    pass\n", r"config\.py:2: `with read_base\(\):` is"),
        ("with read_base():\n    import base\n", r"config\.py:2: only `from MODULE import NAME`"),
        ("with read_base():\n    from .base import nmae\n", r"has no variable 'nmae'.*'name'"),
        ("with read_base():\n    from .base import *\nx = 1 / 0\n", r"config\.py:3: ZeroDivisionError"),
        ("with read_base():\n    from .config import *\n", "a file cannot be its own base"),
        ("with read_base():\n    from .missing import *\n", r"its base .*missing\.py cannot be read"),
    ],
)
def test_unsupported_python_raises_an_error_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, text, base="name = 1\n")


def test_a_base_file_with_a_text_style_base_raises_an_error(tmp_path):
    with pytest.raises(ConfigParsingError, match="cannot use _base_"):
        config(tmp_path, "with read_base():\n    from .base import *\n", base="_base_ = 'other.py'\n")


def test_lazy_import_can_be_selected_and_is_detected(tmp_path):
    text = "import math\nimport torch\nx = torch.float16\n"
    assert isinstance(config(tmp_path, text)._cfg_dict.to_dict()["x"], str)
    eager = Config.fromfile(tmp_path / "config.py", lazy_import=False)
    assert eager.to_dict() == {"x": torch.float16}
    (tmp_path / "config.py").write_text(
        "import math\nfrom math import ceil\ndef double(x): return 2 * x\nx = double(math.floor(ceil(0.5)))\n"
    )
    assert Config.fromfile(tmp_path / "config.py").to_dict() == {"x": 2}
    assert Config.fromfile(tmp_path / "config.py", lazy_import=True).to_dict() == {"x": 2}


def test_lists_contain_the_same_objects_as_in_mmengine(tmp_path):
    cfg = config(tmp_path, "from torch.nn import ReLU\nlayers = [ReLU, dict(type=ReLU)]\n")
    assert isinstance(cfg.layers[0], LazyObject)
    assert cfg.layers[0].build() is cfg.layers[1].type is torch.nn.ReLU


def test_merge_removes_the_delete_key_inside_a_dict_that_replaces_another():
    values = LazyConfigDict({"a": {"b": {"old": 1}, "c": 2}, "d": 3})
    values.merge({"a": {"_delete_": True, "b": {"_delete_": True, "new": 1}}})
    assert values.to_dict() == {"a": {"b": {"new": 1}}, "d": 3}


def test_update_replaces_a_dict_with_delete(tmp_path):
    base = "model = dict(a=dict(x=1, y=dict(z=2)), b=1)\n"
    start = "from mmengine.config import read_base\nwith read_base():\n    from .base import *\n"
    for update, expected in (
        ("a=dict(_delete_=True)", {"a": {}, "b": 1}),
        ("a=dict(_delete_=True, w=3)", {"a": {"w": 3}, "b": 1}),
        ("a=dict(_delete_=False, w=3)", {"a": {"x": 1, "y": {"z": 2}, "w": 3}, "b": 1}),
        ("a=dict(y=dict(_delete_=True)), n=dict(_delete_=True)", {"a": {"x": 1, "y": {}}, "b": 1, "n": {}}),
        ("_delete_=True, w=3", {"w": 3}),
    ):
        assert (
            config(tmp_path, f"{start}model.update(dict({update}))\n", base=base).to_dict()["model"]
            == expected
        )


def library(folder, monkeypatch, name="mmyolo", **configs):
    """Create a package with configurations in `.mim/configs`, and make it importable."""
    target = folder / "site" / name / ".mim/configs"
    target.mkdir(parents=True)
    (folder / "site" / name / "__init__.py").write_text("")
    for key, text in configs.items():
        (target / f"{key}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder / "site"))


BASE = "model = dict(type='A', inner=dict(type='B'))\nparts = dict(one=[dict(type='C')], x=1)\nnote = 'm'\n"


def test_a_base_from_an_installed_library_has_the_scope_of_the_library(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, detector=BASE)
    (tmp_path / "config.py").write_text("_base_ = ['mmyolo::detector.py']\nmodel = dict(depth=2)\n")
    assert Config.fromfile(tmp_path / "config.py").to_dict() == {
        "model": {"type": "A", "inner": {"type": "B"}, "_scope_": "mmyolo", "depth": 2},
        "parts": {"one": [{"type": "C", "_scope_": "mmyolo"}], "x": 1},
        "note": "m",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mmyolo::detectr.py", r"mmyolo has no configuration 'detectr\.py'.*detector\.py"),
        ("mmyolo::../../../../secret.py", "is outside the folder"),
        ("not_installed_library::a/b.py", "requires the package 'not_installed_library'"),
        ("mmyolo::a::b.py", "must have the form"),
    ],
)
def test_error_names_a_base_that_the_library_does_not_contain(tmp_path, monkeypatch, name, message):
    library(tmp_path, monkeypatch, detector=BASE)
    (tmp_path / "secret.py").write_text("x = 1\n")
    (tmp_path / "config.py").write_text(f"_base_ = {name!r}\n")
    with pytest.raises(ConfigError, match=message):
        OwnConfig.fromfile(tmp_path / "config.py")


def test_a_data_file_does_not_execute_a_base_from_a_library(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, detector=BASE)
    (tmp_path / "config.yaml").write_text("_base_: mmyolo::detector.py\n")
    with pytest.raises(ConfigError, match="is a Python file"):
        Config.fromfile(tmp_path / "config.yaml")
    assert Config.fromfile(tmp_path / "config.yaml", trust=True).text.count("type='A'") == 1


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
