import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import BackendError, ConfigError, UnknownNameError
from slipstream.registry import VISBACKENDS, VISUALIZERS
from slipstream.visualization import BaseVisBackend, LocalVisBackend, Visualizer
from slipstream.visualization.backends import default_backends


class Recording(BaseVisBackend):
    def __init__(self):
        super().__init__("unused")
        self.calls = []

    def add_config(self, config):
        self.calls.append(("config", config))

    def add_scalar(self, name, value, step=0):
        self.calls.append(("scalar", name, value, step))

    def add_scalars(self, scalar_dict, step=0, file_path=None):
        self.calls.append(("scalars", dict(scalar_dict), step, file_path))

    def add_image(self, name, image, step=0):
        self.calls.append(("image", name, image.shape, step))

    def close(self):
        self.calls.append(("close",))


def test_every_call_is_passed_to_every_backend():
    class Second(Recording):
        pass

    first, second = Recording(), Second()
    visualizer = Visualizer(vis_backends=[first, second])
    visualizer.add_config({"a": 1})
    visualizer.add_scalar("x", 1.0, 2)
    visualizer.add_scalars({"x": 1.0}, 3, "f.json")
    visualizer.add_image("i", np.zeros((2, 2, 3), np.uint8), 4)
    visualizer.close()
    assert first.calls == second.calls
    assert [call[0] for call in first.calls] == ["config", "scalar", "scalars", "image", "close"]
    assert first.calls[2] == ("scalars", {"x": 1.0}, 3, "f.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires /dev/full")
def test_backends_that_cannot_write_are_reported_once_and_do_not_end_the_run(tmp_path, capsys):
    class Broken(Recording):
        def add_scalars(self, *_):
            raise ConnectionError("no server")

        def close(self):
            raise ConnectionError("no server")

    (tmp_path / "vis_data").mkdir()
    (tmp_path / "vis_data" / "scalars.json").symlink_to("/dev/full")
    visualizer = Visualizer("run", [Broken(), dict(type="LocalVisBackend"), last := Recording()], tmp_path)
    for step in range(3):
        visualizer.add_scalars({"loss": 0.5}, step)
    visualizer.close()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "cannot record values" in line]
    assert ["no server" in line for line in warnings] == [True, False]
    assert "[Errno 28]" in warnings[1]
    assert len(last.calls) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the writer's thread
def test_a_log_folder_that_is_removed_does_not_end_the_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    visualizer = Visualizer("run", default_backends(), tmp_path)
    for step in range(3):
        visualizer.add_scalars({"loss": 0.5}, step)
        visualizer.flush()
        shutil.rmtree(tmp_path / "vis_data", ignore_errors=True)
    visualizer.end_run(failed=False)
    visualizer.close()
    assert capsys.readouterr().err.count("TensorboardVisBackend cannot record values") == 1


def test_backend_that_cannot_start_is_named(tmp_path):
    class Unreachable(Recording):
        def add_config(self, config):
            raise ConnectionError("no server at localhost:1")

    message = (
        "visualizer.vis_backends: Unreachable cannot record the configuration: ConnectionError: no server"
    )
    with pytest.raises(BackendError, match=message):
        Visualizer(vis_backends=[LocalVisBackend(tmp_path), Unreachable()]).add_config({"a": 1})


def test_backends_write_to_vis_data_by_default_and_are_found_by_name(tmp_path):
    config = {
        "type": "Visualizer",
        "save_dir": str(tmp_path),
        "vis_backends": [
            {"type": "LocalVisBackend"},
            {"type": "LocalVisBackend", "name": "other", "save_dir": str(tmp_path / "elsewhere")},
            {"type": "TensorboardVisBackend"},
        ],
    }
    visualizer = VISUALIZERS.build(config)
    assert visualizer.get_backend("LocalVisBackend").save_dir == tmp_path / "vis_data"
    assert visualizer.get_backend("other").save_dir == tmp_path / "elsewhere"
    assert config["vis_backends"][1]["name"] == "other"
    with pytest.raises(UnknownNameError, match=r"'LocalBackend'; did you mean 'LocalVisBackend'\?"):
        visualizer.get_backend("LocalBackend")


def test_two_backends_with_the_same_name_are_rejected():
    with pytest.raises(ConfigError, match=r"vis_backends\[1\]: two backends have the name 'Recording'"):
        Visualizer(vis_backends=[Recording(), Recording()])


def test_every_backend_is_registered():
    for name in ("LocalVisBackend", "TensorboardVisBackend", "WandbVisBackend", "MLflowVisBackend"):
        assert VISBACKENDS.get(name) is not None


def test_import_loads_no_optional_package():
    names = "{'wandb', 'mlflow', 'torch', 'PIL'}"
    code = f"import slipstream.visualization, sys; print(sorted({names} & {{*sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
