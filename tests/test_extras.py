"""Tests of optional packages: training without them, and error messages that name the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.errors import MissingPackageError
from slipstream.extras import extra

OPTIONAL = ("PIL", "hydra", "matplotlib", "omegaconf", "tensorboard", "torchmetrics")

WITHOUT_OPTIONAL_PACKAGES = f"""
import sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {OPTIONAL} else super().find_spec(name, path, target)

sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]

"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONAL_PACKAGES + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_missing_package_error_names_the_install_command():
    with (
        pytest.raises(MissingPackageError, match=r"no_such_package .* pip install 'slipstream\[plots\]'"),
        extra("plots"),
    ):
        import no_such_package
    with pytest.raises(ModuleNotFoundError), extra("plots"):
        import no_such_package  # noqa: F401


def test_runner_trains_without_optional_packages(tmp_path):
    done = run(
        """
import torch
from slipstream import Runner
from slipstream.model import BaseModel

class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, y, mode):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), y)}

data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
Runner(
    model=Net(),
    work_dir=sys.argv[1],
    train_dataloader=dict(batch_size=8, dataset=data),
    train_cfg=dict(by_epoch=True, max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
).train()
""",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "epoch_1.pth").exists()
    assert (
        "TensorBoard is not installed. To log to TensorBoard, run: pip install 'slipstream[tensorboard]'"
        in done.stderr + done.stdout
    )


@pytest.mark.parametrize(
    ("recipe", "name"), [("street_scenes_pp_lite_t", "images"), ("cityscapes_pplite_seg75", "recipes")]
)
def test_command_names_the_missing_extra_in_one_line(recipe, name, tmp_path):
    done = run(
        f"from slipstream.cli.main import main; sys.exit(main(['train', '{recipe}', 'work_dir={tmp_path}']))"
    )
    assert done.returncode in (1, 2)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("slipstream: error: ")
    assert f"pip install 'slipstream[{name}]'" in error
