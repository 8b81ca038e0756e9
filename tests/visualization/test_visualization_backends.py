import json

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.errors import ConfigError
from slipstream.visualization import BaseVisBackend, LocalVisBackend, TensorboardVisBackend


class FakeConfig:
    pretty_text = "model = dict(type='Net')\nlr = 0.1"

    def to_dict(self):
        return {"model": {"type": "Net"}, "lr": 0.1}


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def json_lines(path):
    def refuse(word):
        raise AssertionError(f"{word} is not valid JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_local_backend_writes_scalars_as_json_lines_that_are_readable_during_the_run(tmp_path):
    backend = LocalVisBackend(tmp_path / "vis")
    backend.add_scalars({"loss": 0.5, "epoch": 1}, step=10)
    backend.add_scalar("val/mIoU", np.float32(0.25), step=2)
    assert json_lines(tmp_path / "vis" / "scalars.json") == [
        {"step": 10, "loss": 0.5, "epoch": 1},
        {"step": 2, "val/mIoU": 0.25},
    ]
    backend.close()


def test_values_without_a_json_equivalent_become_null_lists_or_text(tmp_path):
    backend = LocalVisBackend(tmp_path)
    values = {
        "nan": float("nan"),
        "inf": np.float32("-inf"),
        "tensor": torch.tensor([1.0, float("nan")]),
        "array": np.array(3),
        "nested": {"a": (1, None)},
        "path": tmp_path,
        "flag": True,
    }
    backend.add_scalars(values, step=1)
    backend.close()
    assert json_lines(tmp_path / "scalars.json") == [
        {
            "step": 1,
            "nan": None,
            "inf": None,
            "tensor": [1.0, None],
            "array": 3,
            "nested": {"a": [1, None]},
            "path": str(tmp_path),
            "flag": True,
        }
    ]


def test_scalars_are_written_to_file_path_as_well(tmp_path):
    backend = LocalVisBackend(tmp_path)
    backend.add_scalars({"acc": 1.0}, step=3, file_path="20260101.json")
    backend.close()
    assert json_lines(tmp_path / "20260101.json") == json_lines(tmp_path / "scalars.json")
    with pytest.raises(ConfigError, match=r"file_path: must end in \.json"):
        backend.add_scalars({"acc": 1.0}, file_path="a.txt")


def test_local_backend_writes_images_as_lossless_png_files(tmp_path):
    LocalVisBackend(tmp_path).add_image("val/sheet", picture(), step=7)
    loaded = np.asarray(Image.open(tmp_path / "vis_image" / "val" / "sheet_7.png"))
    np.testing.assert_array_equal(loaded, picture())


@pytest.mark.parametrize("config", [FakeConfig(), {"model": {"type": "Net"}, "lr": 0.1}])
def test_local_backend_writes_the_config_as_equivalent_python(tmp_path, config):
    LocalVisBackend(tmp_path).add_config(config)
    namespace = {}
    exec((tmp_path / "config.py").read_text(), namespace)
    assert namespace["model"] == {"type": "Net"}
    assert namespace["lr"] == 0.1


def test_tensorboard_returns_the_written_values(tmp_path):
    backend = TensorboardVisBackend(tmp_path)
    assert not list(tmp_path.iterdir())  # no files before the first use
    backend.add_config(FakeConfig())
    backend.add_scalars({"loss": torch.tensor(0.5), "note": "text", "vector": np.ones(3)}, step=4)
    backend.add_scalar("loss", 0.25, step=5)
    backend.add_image("sheet", picture(), step=1)
    backend.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.5), (5, 0.25)]
    assert events.Images("sheet")[0].width == 8
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    model = dict(type='Net')\n    lr = 0.1"


def test_custom_backend_must_define_only_add_scalar(tmp_path):
    class Mine(BaseVisBackend):
        def __init__(self, save_dir):
            super().__init__(save_dir)
            self.seen = []

        def add_scalar(self, name, value, step=0):
            self.seen.append((name, value, step))

    backend = Mine(tmp_path)
    backend.add_scalars({"a": 1, "b": 2}, step=3)
    backend.add_config({})
    backend.add_image("x", picture())
    backend.close()
    assert backend.seen == [("a", 1, 3), ("b", 2, 3)]
    assert backend.experiment is backend
