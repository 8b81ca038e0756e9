"""Tests of the Trainer: training with SuperGradients' keys, resuming, evaluation, and errors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from slipstream import Trainer
from slipstream.checkpoint import load_checkpoint, mark_last_checkpoint, save_checkpoint
from slipstream.errors import CheckpointError
from slipstream.hooks import Hook

QUIET = dict(silent_mode=True, average_best_models=False)
SGD = dict(max_epochs=2, initial_lr=0.1, loss="CrossEntropyLoss", **QUIET)


def images(count=40):
    inputs = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.mean((1, 2, 3)) > 0).long()


def network(classes=2, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, classes),
        )


def loader(batch_size=8, **options):
    return DataLoader(TensorDataset(*images()), batch_size, **options)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


class Named(Dataset):
    """A dataset with class names, whose samples are dicts."""

    def __init__(self, classes=("dark", "light")):
        self.metainfo = dict(classes=classes)
        self.inputs, self.targets = images()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return dict(inputs=self.inputs[index], targets=self.targets[index])


# ---- training results ------------------------------------------------------------------------------------


def by_hand(net, epochs, warmup, batches, accumulate, rates, decay, clip):
    """Train in plain PyTorch as in SuperGradients' documentation. Losses are averaged over each accumulation window."""
    groups = [
        dict(params=[p], start=rates[n[0] == "0"], weight_decay=decay * (p.ndim > 1), lr=0.0)
        for n, p in net.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    length, steps = len(batches), 0

    def set_rates(factor):
        for group in optimizer.param_groups:
            group["lr"] = group["start"] * factor

    for epoch in range(epochs):
        if epoch <= warmup:
            start = 1 / (warmup + 1)
            set_rates(start + (1 - start) * epoch / max(warmup, 1) if epoch < warmup else 1.0)
        for number, (inputs, targets) in enumerate(batches):
            (F.cross_entropy(net(inputs), targets) / accumulate).backward()
            steps += 1
            if steps % accumulate:
                continue
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if epoch >= warmup:
                done = (epoch - warmup) * length + number
                set_rates((1 - done / ((epochs - warmup) * length)) ** 0.9)


def test_training_matches_a_plain_torch_loop(tmp_path):
    mine, theirs = network(), network()
    theirs.train()
    by_hand(theirs, 4, 1, list(loader()), 2, {True: 0.01, False: 0.1}, 0.05, 0.5)
    Trainer("exp", tmp_path).train(
        model=mine,
        training_params=dict(
            max_epochs=4,
            lr_mode="PolyLRScheduler",
            initial_lr={"0": 0.01, "default": 0.1},
            lr_warmup_epochs=1,
            optimizer="SGD",
            optimizer_params=dict(momentum=0.9, weight_decay=0.05),
            zero_weight_decay_on_bias_and_bn=True,
            loss="CrossEntropyLoss",
            clip_grad_norm=0.5,
            batch_accumulate=2,
            **QUIET,
        ),
        train_loader=loader(),
    )
    assert_close(weights(mine), weights(theirs))
    assert (mine[0].weight - network()[0].weight).abs().max() > 1e-3  # the weights changed


def test_resumed_training_ends_with_the_same_weights(tmp_path):
    whole, parts = network(), network()
    Trainer("whole", tmp_path).train(whole, {**SGD, "max_epochs": 3}, loader(shuffle=True))
    Trainer("parts", tmp_path).train(parts, {**SGD, "max_epochs": 1}, loader(shuffle=True))
    other = network(seed=5)
    again = Trainer("parts", tmp_path)
    again.train(other, {**SGD, "max_epochs": 3, "resume": True}, loader(shuffle=True))
    assert again.runner.iter == 15
    assert_close(weights(whole), weights(other))


# ---- validation, checkpoints, tests ----------------------------------------------------------------------


def test_train_returns_the_metrics_of_each_validation(tmp_path):
    params = {**SGD, "max_epochs": 3, "run_validation_freq": 2, "valid_metrics_list": ["Accuracy"]}
    trainer = Trainer("exp", tmp_path)
    history = trainer.train(net := network(), params, loader(), loader())
    assert [entry["epoch"] for entry in history] == [2, 3]
    net.eval()
    inputs, targets = images()
    right = (net(inputs).argmax(1) == targets).float().mean().item()
    assert history[-1]["Accuracy"] == pytest.approx(right)
    names = {path.name for path in Path(trainer.checkpoints_dir_path).iterdir()}
    assert {"ckpt_latest.pth", "ckpt_best.pth"} <= names


def accuracy(net):
    inputs, targets = images()
    return pytest.approx((net.eval()(inputs).argmax(1) == targets).float().mean().item())


def test_network_can_be_tested_before_and_after_training_and_with_ema(tmp_path):
    trainer = Trainer("exp", tmp_path)
    net = network(seed=3)
    test = dict(test_loader=loader(), test_metrics_list=["Accuracy"], silent_mode=True)
    assert trainer.test(net, **test) == dict(Accuracy=accuracy(net))
    average = dict(ema=True, ema_params=dict(decay=0.999, decay_type="constant"))
    trainer.train(net, {**SGD, **average, "initial_lr": 1.0}, loader())
    saved = load_checkpoint(Path(trainer.checkpoints_dir_path) / "ckpt_latest.pth")["state_dict"]
    averaged = network()
    averaged.load_state_dict({name.removeprefix("network."): value for name, value in saved.items()})
    # If the accuracies were equal, the test could not tell the average and the trained weights apart.
    assert accuracy(averaged) != accuracy(net).expected
    assert trainer.test(**test) == trainer.test(net, **test) == dict(Accuracy=accuracy(averaged))
    assert trainer.test(use_ema_net=False, **test) == dict(Accuracy=accuracy(net))


def test_test_loaders_are_evaluated_during_training_under_their_names(tmp_path):
    seen = []

    class Watch(Hook):
        def after_test_epoch(self, runner, metrics=None):
            seen.append((runner.epoch + 1, metrics))

    trainer = Trainer("exp", tmp_path)
    params = {
        **SGD,
        "max_epochs": 4,
        "run_test_freq": 2,
        "valid_metrics_list": ["Accuracy"],
        "phase_callbacks": [Watch()],
    }
    tests = dict(all=loader(), few=DataLoader(TensorDataset(*images(8)), 4))
    history = trainer.train(network(), params, loader(), loader(), test_loaders=tests)
    assert [(epoch, list(metrics)) for epoch, metrics in seen] == [
        (2, ["all/Accuracy"]),
        (2, ["few/Accuracy"]),
        (4, ["all/Accuracy"]),
        (4, ["few/Accuracy"]),
    ]
    assert seen[2][1]["all/Accuracy"] == history[-1]["Accuracy"]
    assert list(trainer.test()) == ["Accuracy"]


# ---- pre_prediction_callback -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [loader(), DataLoader(Named(), 8)], ids=["pairs", "dicts"])
def test_pre_prediction_callback_can_change_the_batches(tmp_path, data):
    numbers = []

    def darken(inputs, targets, batch_idx):
        numbers.append(batch_idx)
        return inputs - 1, 1 - targets

    mine, theirs = network(), network()
    Trainer("mine", tmp_path).train(mine, {**SGD, "pre_prediction_callback": darken}, data)
    inputs, targets = images()
    changed = DataLoader(TensorDataset(inputs - 1, 1 - targets), 8)
    Trainer("theirs", tmp_path).train(theirs, SGD, changed)
    assert numbers == [0, 1, 2, 3, 4] * 2
    assert_close(weights(mine), weights(theirs))


# ---- invalid input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ("model: {type: SupervisedModel, network: '{{ $SECRET }}'}", "environment variables"),
        ("model: {type: SupervisedModel, network: '{{ $SECRET:other }}'}", "environment variables"),
        ("_base_: model.yaml", "contains Python objects"),
    ],
)
def test_a_checkpoint_reads_neither_the_environment_nor_files(tmp_path, monkeypatch, cfg, message):
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text("model: {type: hidden}\n")
    path = tmp_path / "exp" / "epoch_1.pth"
    path.parent.mkdir()
    meta = {"cfg": cfg, "epoch": 1, "iter": 2}
    save_checkpoint({"meta": meta, "state_dict": {}}, path, pytest.fail)
    mark_last_checkpoint(path.parent, path)
    with pytest.raises(CheckpointError, match=message) as error:
        Trainer.resume_experiment("exp", tmp_path)
    assert "hidden" not in str(error.value)
