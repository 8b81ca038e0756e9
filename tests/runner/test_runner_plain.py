"""Test that a Runner trains a plain `nn.Module` with `loss_fn` like a hand-written float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from slipstream import Runner
from slipstream.hooks import Hook
from tiny_runs import Accuracy, loader, samples, scalars, training


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def data():
    inputs, targets = samples()
    return TensorDataset(inputs.double(), targets)


def arguments(work_dir, model=None, **changes):
    return {
        **training(work_dir, model=net() if model is None else model, loss_fn=F.cross_entropy),
        "train_dataloader": loader(data(), shuffle=False),
        "optim_wrapper": dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        **changes,
    }


def by_hand(model, loss_of, epochs=2, window=1, decay=None):
    """Train with a plain loop. Return the moving average of the weights, or the final weights if `decay` is None."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = data().tensors
    average, number = None, 0
    for _ in range(epochs):
        for start in range(0, 40, 8):
            number += 1
            (loss_of(model, inputs[start : start + 8], targets[start : start + 8]) / window).backward()
            if number % window:
                continue
            optimizer.step()
            optimizer.zero_grad()
            now = {
                name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()
            }
            if average is not None and decay:
                now = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
            average = now
    return average


def cross_entropy(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def assert_close(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-9, atol=1e-12)


COMPILED = dict(backend="eager")


@pytest.mark.parametrize(
    "speed",
    [
        {},
        dict(compile=COMPILED),
        dict(compile=dict(scope="model", backend="eager")),
        dict(compile=COMPILED, accumulate=2),
        dict(channels_last=True, prefetch=2, gc=3, nan_guard="skip"),
    ],
    ids=["eager", "graph", "model", "accumulation", "others"],
)
def test_plain_module_trains_as_in_a_plain_loop(tmp_path, speed):
    runner = Runner(**arguments(tmp_path, speed=speed))
    assert runner.train() is runner.model
    expected = net()
    by_hand(expected, cross_entropy, window=speed.get("accumulate", 1))
    assert_close(runner.model.state_dict(), expected.state_dict())


def test_checkpoint_has_the_parameter_names_of_the_module(tmp_path):
    model = net()
    Runner(**arguments(tmp_path, model)).train()
    content = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    fresh = net()
    fresh.load_state_dict(content["state_dict"])
    assert_close(fresh.state_dict(), model.state_dict())


def test_average_matches_a_plain_loop(tmp_path):
    runner = Runner(**arguments(tmp_path, speed=dict(ema=dict(type="constant", decay=0.8))))
    runner.train()
    content = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    average = by_hand(net(), cross_entropy, decay=0.8)
    assert_close({name: content["state_dict"][name] for name in average}, average)


@pytest.mark.parametrize("speed", [{}, dict(compile=COMPILED), dict(accumulate=5)], ids=str)
def test_run_resumes_exactly(tmp_path, speed):
    whole = Runner(**arguments(tmp_path / "whole", train_dataloader=loader(data()), speed=speed))
    whole.train()
    parts = dict(train_dataloader=loader(data()), speed=speed)
    Runner(**arguments(tmp_path / "parts", **parts, train_cfg=dict(by_epoch=True, max_epochs=1))).train()
    resumed = Runner(**arguments(tmp_path / "parts", **parts, resume=True))
    resumed.train()
    tolerance = dict(rtol=1e-9, atol=1e-12) if speed else dict(rtol=0, atol=0)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), **tolerance)


class OwnLoss(nn.Module):
    """A model that returns its loss, and whose `init_weights` must not be called."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def init_weights(self):
        raise AssertionError

    def forward(self, x, labels):
        logits = self.net(x)
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "aux_loss": 2 * loss.detach(), "logits": logits}


class Dicts(TensorDataset):
    def __getitem__(self, index):
        x, label = super().__getitem__(index)
        return {"x": x, "labels": label}


def dicts():
    return loader(Dicts(*data().tensors), shuffle=False)


def test_model_that_returns_its_loss_trains_on_dict_batches(tmp_path):
    runner = Runner(**arguments(tmp_path, OwnLoss(), loss_fn="model", train_dataloader=dicts()))
    runner.train()
    expected = net()
    by_hand(expected, cross_entropy)
    assert_close(runner.model.net.state_dict(), expected.state_dict())
    assert scalars(runner)[-1]["aux_loss"] == pytest.approx(2 * scalars(runner)[-1]["loss"])


def test_metrics_receive_outputs_and_targets(tmp_path):
    validation = dict(
        val_dataloader=loader(data(), shuffle=False), val_cfg={}, val_evaluator=dict(type=Accuracy)
    )
    runner = Runner(**arguments(tmp_path, **validation))
    runner.train()
    inputs, targets = data().tensors
    expected = (runner.model.eval()(inputs).argmax(1) == targets).double().mean().item()
    assert runner.val()["acc"] == pytest.approx(expected)
    assert runner.message_hub.get_scalar("val/acc").current() == pytest.approx(expected)


class FreezesFirst(nn.Sequential):
    """A model whose `train` method puts its BatchNorm into evaluation mode in the first epoch."""

    epochs = 0

    def train(self, mode=True):
        super().train(mode)
        if mode and self.epochs < 1:
            self[1].eval()
        return self


@pytest.mark.parametrize("stage", [None, "before_train", "before_train_epoch"])
def test_modules_in_evaluation_mode_stay_in_it(tmp_path, stage):
    model = net()
    model[1].train(stage is not None)
    hooks = (
        [] if stage is None else [type("Sets", (Hook,), {stage: lambda _, runner: runner.model[1].eval()})()]
    )
    validation = dict(val_dataloader=loader(data(), shuffle=False), val_cfg={}, val_evaluator="loss")
    Runner(**arguments(tmp_path, model, custom_hooks=hooks, **validation)).train()
    assert model[1].num_batches_tracked == 0


def test_a_hook_after_validation_can_end_the_evaluation_mode(tmp_path, capfd):
    class Unfreezes(Hook):
        def after_val_epoch(self, runner, metrics=None):
            runner.model[1].train()

    model = net()
    model[1].eval()
    validation = dict(val_dataloader=loader(data(), shuffle=False), val_cfg={}, val_evaluator="loss")
    log = dict(log_level="WARNING", custom_hooks=[Unfreezes()])
    Runner(**arguments(tmp_path, model, **log, **validation)).train()
    assert model[1].num_batches_tracked == 5
    assert "stay in evaluation mode" in capfd.readouterr().out


def test_modules_that_the_train_method_freezes_cause_no_warning(tmp_path, capfd):
    model = FreezesFirst(*net()).train()
    assert not all(module.training for module in model)
    Runner(**arguments(tmp_path, model, log_level="WARNING")).train()
    assert "stay in evaluation mode" not in capfd.readouterr().out


def test_a_module_that_the_train_method_freezes_is_trained_once_the_method_unfreezes_it(tmp_path):
    class Counts(Hook):
        def after_train_epoch(self, runner):
            runner.model.epochs += 1

    model = FreezesFirst(*net())
    Runner(**arguments(tmp_path, model, custom_hooks=[Counts()])).train()
    assert model[1].num_batches_tracked == 5


class Detector(nn.Module):
    """A model with losses in training mode and predictions in evaluation mode, like torchvision's detectors."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 1, dropout=0.5)

    def forward(self, inputs, targets):
        attended = self.attention(*[self.norm(inputs)] * 3)[0]
        attended = F.scaled_dot_product_attention(*[attended] * 3, dropout_p=0.5 if self.training else 0.0)
        attended = F.batch_norm(attended, None, None, training=True)
        scores = self.last(F.dropout(self.drop(attended), 0.5, self.training))
        return {"loss_class": F.cross_entropy(scores, targets)} if self.training else list(scores)


def test_validation_loss_of_a_detector_is_that_of_its_layers_in_evaluation_mode(tmp_path):
    torch.manual_seed(0)
    modes = []

    class Modes(Hook):
        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            modes.extend(module.training for module in runner.model.modules())

    loaders = dict(val_dataloader=loader(data(), shuffle=False), val_cfg={}, val_evaluator="loss")
    model = Detector().double()
    runner = Runner(**arguments(tmp_path, model, loss_fn="model", custom_hooks=[Modes()], **loaders))
    runner.train()
    statistics = model.norm.running_mean.clone()
    found = runner.val()["loss"]
    model.eval()
    expected = [
        F.cross_entropy(torch.stack(model(x, y)), y).item() * len(x) for x, y in runner.val_dataloader
    ]
    assert found == pytest.approx(sum(expected) / len(data()), rel=1e-6)
    assert torch.equal(model.norm.running_mean, statistics)
    assert not any(modes)
