"""`import super_gradients` imports Slipstream after an opt-in, and SuperGradients' scripts run unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError, UnknownNameError
from slipstream.training.super_gradients import scripts
from slipstream.training.super_gradients.scripts import StrictLoad, register_loss, register_model

SRC = str(Path(__file__).parents[2] / "src")


def run(*arguments, cwd=None, code=0, path=()):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *map(str, path)])}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300, cwd=cwd
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_names_are_imported_in_all_forms(tmp_path):
    (tmp_path / "super_gradients").mkdir()
    (tmp_path / "super_gradients/__init__.py").write_text("raise RuntimeError('installed')\n")
    program = (
        "import slipstream.supergradients, super_gradients\n"
        "from super_gradients import Trainer, init_trainer, setup_device\n"
        "from super_gradients.training import models, dataloaders, training_hyperparams\n"
        "from super_gradients.training import Trainer as Same\n"
        "from super_gradients.training.utils.callbacks import Phase\n"
        "from super_gradients.common.registry.registry import register_model\n"
        "import super_gradients.training.losses\n"
        "assert Trainer is Same and callable(models.get) and callable(dataloaders.cifar10_train)\n"
        "assert super_gradients.training.metrics.IoU.__module__ == 'slipstream.training.metrics'\n"
        "assert not hasattr(super_gradients, 'nothing')\n"
        "print(super_gradients.__version__)\n"
    )
    done = run("-c", program, path=[tmp_path])
    assert done.stdout.split()[-1] == "3.7.1"
    assert (done.stdout + done.stderr).count("`import super_gradients` now imports Slipstream") == 1


OWN_PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from super_gradients.common.registry import register_loss, register_lr_scheduler
from super_gradients.training.kd_trainer import KDTrainer
from super_gradients.training.losses import KDLogitsLoss
from super_gradients.training.metrics import Accuracy
from super_gradients.training.utils.callbacks import LRCallbackBase, Phase
from super_gradients.training.utils.ema_decay_schedules import EMA_DECAY_FUNCTIONS, IDecayFunction


@register_loss("scaled_loss")
class ScaledLoss(nn.Module):
    component_names = ["ce"]

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, preds, target):
        loss = nn.functional.cross_entropy(preds, target)
        return self.factor * loss, loss.detach().unsqueeze(0)


@register_lr_scheduler("halved")
class Halved(LRCallbackBase):
    def __init__(self, halved_from, **kwargs):
        super().__init__(Phase.TRAIN_EPOCH_END, **kwargs)
        self.halved_from = halved_from

    def is_lr_scheduling_enabled(self, context):
        return context.epoch + 1 >= self.halved_from

    def perform_scheduling(self, context):
        self.lr = {name: rate / 2 for name, rate in self.initial_lr.items()}
        self.update_lr(context.optimizer, context.epoch, None)


class LinearDecay(IDecayFunction):
    def __init__(self, **kwargs):
        pass

    def __call__(self, decay, step, total_steps):
        return decay * step / total_steps


EMA_DECAY_FUNCTIONS["linear"] = LinearDecay
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(3, (8,))), batch_size=4)
trainer = KDTrainer("own", ckpt_root_dir="checkpoints")
trainer.train(
    student=nn.Linear(4, 3),
    teacher=nn.Linear(4, 3),
    training_params={
        "max_epochs": 2,
        "initial_lr": 0.1,
        "lr_mode": "halved",
        "halved_from": 1,
        "loss": "KDLogitsLoss",
        "criterion_params": {"task_loss_fn": {"scaled_loss": {"factor": 2.0}}},
        "ema": True,
        "ema_params": {"decay": 0.9, "decay_type": "linear"},
        "valid_metrics_list": [Accuracy()],
        "metric_to_watch": "KDLogitsLoss/Loss",
        "greater_metric_to_watch_is_better": False,
    },
    train_loader=loader,
    valid_loader=loader,
)
loss = trainer.runner.model.loss
assert isinstance(loss, KDLogitsLoss) and loss.task_loss_fn.factor == 2.0
print("rate", trainer.runner.optim_wrapper.get_lr()["lr"][0])
"""


@pytest.mark.slow
def test_losses_schedules_and_decays_in_a_script_are_found_by_name(tmp_path):
    (tmp_path / "train.py").write_text(OWN_PARTS)
    done = run("-m", "slipstream.supergradients", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "rate 0.05"
    assert (tmp_path / "checkpoints/own/ckpt_best.pth").is_file()


@pytest.mark.slow
def test_workers_that_are_not_forked_import_slipstream(tmp_path):
    (tmp_path / "parts.py").write_text(
        "import super_gradients\n"
        "class Names:\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): return super_gradients.Trainer.__module__\n"
    )
    (tmp_path / "train.py").write_text(
        "import super_gradients, parts\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        "    print(*DataLoader(parts.Names(), num_workers=1, multiprocessing_context='spawn'))\n"
    )
    done = run("-m", "slipstream.supergradients", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "['slipstream.training.super_gradients.scripts']"


def test_models_get_has_supergradients_argument_order_and_defaults(tmp_path):
    network = scripts.get_model("pp_lite_t_seg75", {"use_aux_heads": False}, 4)
    assert isinstance(network.eval()(torch.zeros(1, 3, 64, 64)), torch.Tensor)
    renamed = {f"other{index}": tensor for index, tensor in enumerate(network.state_dict().values())}
    torch.save({"net": renamed}, tmp_path / "weights.pth")
    again = scripts.get_model(
        model_name="pp_lite_t_seg75", arch_params={"use_aux_heads": False}, num_classes=4,
        checkpoint_path=tmp_path / "weights.pth",
    )  # fmt: skip
    torch.testing.assert_close(again.state_dict(), network.state_dict())
    strict = dict(strict_load=StrictLoad.ON, checkpoint_path=tmp_path / "weights.pth")
    with pytest.raises(Exception, match="belongs to a different model"):
        scripts.get_model("pp_lite_t_seg75", {"use_aux_heads": False}, 4, **strict)
    with pytest.raises(ConfigError, match="requires checkpoint_path"):
        scripts.get_model("resnet18", num_classes=4, load_backbone=True)


def test_registered_classes_are_found_by_name():
    @register_model("net_of_the_test")
    class Net(nn.Module):
        def __init__(self, arch_params):
            super().__init__()
            self.head = nn.Linear(2, arch_params["width"])

    @register_loss(name="LossOfTheTest", deprecated_name="old_loss_of_the_test")
    class Loss(nn.Module):
        pass

    from slipstream.training.losses import loss_config

    assert scripts.get_model("net_of_the_test", {"width": 5}).head.out_features == 5
    assert loss_config("LossOfTheTest") == {"type": "LossOfTheTest"}
    assert loss_config("old_loss_of_the_test") == {"type": "old_loss_of_the_test"}


def test_training_hyperparams_are_read_from_recipes_and_groups():
    params = scripts.get_params(
        "training_hyperparams/cifar10_resnet_train_params", {"max_epochs": 3, "seed": None}
    )
    assert (params["max_epochs"], params["lr_updates"], params["seed"]) == (3, [100, 150, 200], 42)
    assert (params["warmup_mode"], params["sg_logger_params"]) == ("LinearEpochLRWarmup", {})
    pytest.importorskip("hydra")
    assert scripts.get_params("cityscapes_regseg48")["initial_lr"] == 0.02
    with pytest.raises(UnknownNameError, match="did you mean"):
        scripts.get_params("cifar10_resnett")
