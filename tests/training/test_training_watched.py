"""Tests of losses as `metric_to_watch`: their names, the mean over all samples, and the best checkpoint."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from slipstream.hooks import Hook
from slipstream.training import KDTrainer, Phase, Trainer
from slipstream.training.params import TrainingParams


class Both(nn.Module):
    """A loss that returns a pair, as in SuperGradients: the loss to minimize, and its components."""

    component_names = ("ce", "size")

    def forward(self, scores, labels):
        loss = F.cross_entropy(scores, labels)
        return 2 * loss, torch.stack([loss, scores.abs().mean()]).detach()


class Unnamed(Both):
    component_names = None


def data(count=22):
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.randn(count, 5, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )
    return TensorDataset(inputs, labels)


def train(folder, loss, watched, trainer=Trainer, **params):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    # the last validation batch has 2 samples
    loaders = [DataLoader(data(), batch_size=size) for size in (11, 4)]
    keys = dict(
        max_epochs=3, initial_lr=0.5, loss=loss, metric_to_watch=watched, silent_mode=True, average_best_models=False
    )  # fmt: skip
    runner = trainer("run", str(folder))
    extra = params.pop("extra", {})
    arguments = {"model": net} if trainer is Trainer else {"student": net, **extra}
    history = runner.train(
        training_params=keys | params, train_loader=loaders[0], valid_loader=loaders[1], **arguments
    )
    return runner, net.eval(), history


@pytest.mark.parametrize(
    ("loss", "watched", "title"),
    [
        ("CrossEntropyLoss", "cross_entropy_loss", "CrossEntropyLoss"),
        ("cross_entropy", "CrossEntropyLoss", "CrossEntropyLoss"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss", "CrossEntropyLoss"),
        (F.cross_entropy, "cross_entropy", "cross_entropy"),
        (Both(), "Both/ce", "Both/ce"),
        (Both(), "ce", "Both/ce"),
        (Unnamed(), "Unnamed/loss_0", "Unnamed/loss_0"),
    ],
)
def test_the_watched_loss_is_the_mean_over_all_samples_in_evaluation_mode(tmp_path, loss, watched, title):
    _, net, history = train(tmp_path, loss, watched)
    with torch.no_grad():
        wanted = F.cross_entropy(net(data().tensors[0]).double(), data().tensors[1]).item()
    assert history[-1] == pytest.approx({"epoch": 3, title: wanted}, rel=1e-5)


def test_the_best_checkpoint_has_the_lowest_loss(tmp_path):
    runner, _, history = train(
        tmp_path, "CrossEntropyLoss", "CrossEntropyLoss", max_epochs=6, initial_lr=3.0, average_best_models=True,
        greater_metric_to_watch_is_better=True, valid_metrics_list=["Accuracy"],
    )  # fmt: skip
    losses = [entry["CrossEntropyLoss"] for entry in history[:6]]
    assert losses[-1] > min(losses)
    best = torch.load(tmp_path / "run/ckpt_best.pth", weights_only=True)
    assert best["meta"]["epoch"] == losses.index(min(losses)) + 1
    assert runner.best_metric == min(losses)
    assert runner.runner.message_hub.log_scalars["val/CrossEntropyLoss"].current() > 0


class Records(Hook):
    """Records the learning rate and the training accuracy of each epoch."""

    def __init__(self):
        self.rates, self.values = [], []

    def before_train_epoch(self, runner):
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])

    def after_train_epoch(self, runner):
        self.values.append(runner.message_hub.get_info("train/Accuracy"))


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_plateau_schedule_at_the_end_of_a_training_epoch_monitors_a_training_metric(tmp_path, warmup):
    records, own = Records(), {"mode": "max", "patience": 0}
    mode = {"ReduceLROnPlateau": {**own, "phase": Phase.TRAIN_EPOCH_END, "metric_name": "accuracy"}}
    train(
        tmp_path, "CrossEntropyLoss", None, max_epochs=8, lr_mode=mode, phase_callbacks=[records],
        train_metrics_list=["Accuracy"], lr_warmup_epochs=warmup, warmup_initial_lr=0.5,
    )  # fmt: skip
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, wanted = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **own), []
    for epoch, value in enumerate(records.values):
        wanted.append(optimizer.param_groups[0]["lr"])
        if epoch >= warmup:
            schedule.step(value)
    assert records.rates == wanted
    assert len(set(wanted)) > 2


def test_the_distillation_loss_includes_the_teacher(tmp_path):
    torch.manual_seed(1)
    teacher = nn.Linear(5, 3)
    loss = {"KDLogitsLoss": {"task_loss_fn": "CrossEntropyLoss", "distillation_loss_coeff": 0.25}}
    _, net, history = train(tmp_path, loss, "Loss", KDTrainer, extra={"teacher": teacher})
    inputs, labels = data().tensors
    with torch.no_grad():
        scores, wanted = net(inputs).double(), teacher(inputs).double().softmax(1)
    apart = (wanted * (wanted.log() - scores.log_softmax(1))).sum() / len(inputs)
    total = 0.75 * F.cross_entropy(scores, labels) + 0.25 * apart
    assert history[-1]["KDLogitsLoss/Loss"] == pytest.approx(total.item(), rel=1e-5)


def params(**values):
    return TrainingParams.read({"max_epochs": 1, "initial_lr": 0.1, "loss": "CrossEntropyLoss", **values})
