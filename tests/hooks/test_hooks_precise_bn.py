"""PreciseBNHook computes exact BatchNorm statistics and does not affect training."""

import pytest
import torch
import torch.nn.functional as F
from ema_runs import SCHEDULED, History, average_of
from torch import nn
from torch.utils.data import TensorDataset

from slipstream.errors import ConfigError, ModelError
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner
from tiny_runs import Net, Noisy, assert_same, loader, run, samples, training, validation, weights

STATISTICS = ("norm.running_mean", "norm.running_var")


class Seen(Hook):
    """A hook that stores each step's batch, loss and state of torch's random number generator."""

    def __init__(self):
        self.batches, self.losses, self.drawn = [], [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.batches.append([part.clone() for part in data_batch])
        self.losses.append(outputs["loss"].clone())
        self.drawn.append(torch.get_rng_state())


def precise(folder, num_samples=40, interval=1, hooks=(), **changes):
    """Train with the hook. Return the Runner."""
    hook = dict(type="PreciseBNHook", num_samples=num_samples, interval=interval)
    changes.setdefault("model", dict(type=Net, norm=True))
    return run(folder, custom_hooks=[*hooks, hook], **changes)


def saved(folder, epoch=2):
    return torch.load(folder / f"epoch_{epoch}.pth", weights_only=True)["state_dict"]


def by_hand(state, batches):
    """Return the mean and variance of the first layer's outputs for the batches, in double precision."""
    values = torch.cat(
        [F.linear(x.double(), state["first.weight"].double(), state["first.bias"].double()) for x in batches]
    )
    return values.mean(0), values.var(0, correction=0)


def assert_statistics(state, batches):
    for name, expected in zip(STATISTICS, by_hand(state, batches), strict=True):
        torch.testing.assert_close(state[name].double(), expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("num_samples", "batches"), [(8, 1), (9, 2), (39, 5), (4000, 5)])
def test_statistics_are_computed_from_num_samples(tmp_path, num_samples, batches):
    seen = Seen()
    precise(tmp_path, num_samples, hooks=[seen])
    for epoch in (1, 2):
        epochs_batches = [x for x, _ in seen.batches[5 * epoch - 5 : 5 * epoch]]
        assert_statistics(saved(tmp_path, epoch), epochs_batches[:batches])


def test_smaller_last_batch_is_weighted_by_its_samples(tmp_path):
    precise(tmp_path, train_dataloader=loader(batch_size=16))  # batches of 16, 16 and 8
    assert_statistics(saved(tmp_path), [samples()[0]])


def test_validation_and_checkpoint_use_the_new_statistics(tmp_path):
    history = History()
    precise(tmp_path, hooks=[history], **validation())
    for epoch in (1, 2):
        for name in STATISTICS:
            assert torch.equal(history.validated[epoch - 1][name], saved(tmp_path, epoch)[name])
    assert_statistics(history.validated[1], [samples()[0]])


@pytest.mark.parametrize("workers", [0, 2])
def test_hook_does_not_change_training(tmp_path, workers):
    options = dict(
        model=dict(type=Net, norm=True, dropout=0.3),
        train_dataloader=loader(Noisy(), num_workers=workers, persistent_workers=workers > 0),
    )
    with_it, without = Seen(), Seen()
    one = precise(tmp_path / "a", num_samples=20, hooks=[with_it], **options)
    other = run(tmp_path / "b", custom_hooks=[without], **options)
    for mine, theirs in zip(with_it.batches, without.batches, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, with_it.losses, without.losses))
    assert all(map(torch.equal, with_it.drawn, without.drawn))
    own, plain = weights(one), weights(other)
    changed = {name for name, value in own.items() if not torch.equal(value, plain[name])}
    assert changed == set(STATISTICS)


class Others(BaseModel):
    """A model in which some BatchNorm statistics must not change. It counts its forward passes in training mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm, self.twice = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.cumulative, self.frozen = nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8)
        self.untracked, self.idle = nn.BatchNorm1d(8, track_running_stats=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, inputs, targets, mode):
        if self.training:
            self.forwards += 1
        x = self.norm(self.first(inputs))
        x = self.twice(2 * self.twice(x + 1)) + self.cumulative(x) + self.frozen(x) + self.untracked(x)
        return {"loss": F.cross_entropy(self.last(x), targets)}


def test_other_buffers_and_layers_without_moving_average_are_unchanged(tmp_path):
    model = dict(type=Others)
    one, other = weights(precise(tmp_path / "a", model=model)), weights(run(tmp_path / "b", model=model))
    changed = {name for name, value in one.items() if not torch.equal(value, other[name])}
    assert changed == {*STATISTICS, "twice.running_mean", "twice.running_var"}


def test_shared_layer_uses_the_inputs_of_both_calls(tmp_path):
    state = weights(precise(tmp_path, model=dict(type=Others), train_dataloader=loader(batch_size=40)))
    double = {name: value.double() for name, value in state.items()}
    x = F.linear(samples()[0].double(), double["first.weight"], double["first.bias"])
    x = F.batch_norm(x, None, None, double["norm.weight"], double["norm.bias"], training=True) + 1
    again = 2 * F.batch_norm(x, None, None, double["twice.weight"], double["twice.bias"], training=True)
    both = torch.cat([x, again])
    torch.testing.assert_close(double["twice.running_mean"], both.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(double["twice.running_var"], both.var(0, correction=0), rtol=1e-5, atol=1e-5)


def test_large_values_with_small_variance_are_accurate(tmp_path):
    x, y = samples()
    far = loader(TensorDataset(x / 10 + 300, y))
    still = dict(optimizer=dict(type="SGD", lr=0.0))
    precise(tmp_path, train_dataloader=far, optim_wrapper=still)
    state = saved(tmp_path)
    values = F.linear(x / 10 + 300, state["first.weight"], state["first.bias"]).double()
    torch.testing.assert_close(
        state["norm.running_var"].double(), values.var(0, correction=0), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    "hook", [dict(type="EMAHook", momentum=0.3), dict(SCHEDULED, decay=0.7, decay_type="constant")]
)
def test_statistics_belong_to_the_validated_average(tmp_path, hook):
    history = History()
    runner = precise(tmp_path, hooks=[hook, history], **validation())
    assert_statistics(history.validated[0], [samples()[0]])
    assert_statistics(history.validated[1], [samples()[0]])
    assert not torch.equal(history.validated[1]["first.weight"], weights(runner)["first.weight"])
    assert_same(history.validated[1], saved(tmp_path))
    plain = run(tmp_path / "b", model=dict(type=Net, norm=True))
    assert torch.equal(weights(plain)["first.weight"], weights(runner)["first.weight"])
    assert average_of(runner).steps == 10


@pytest.mark.parametrize("scope", ["step", "model"])
def test_hook_does_not_recompile_the_model(tmp_path, scope):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    counts = {}
    for name, hook in (("a", []), ("b", [dict(type="PreciseBNHook", num_samples=40)])):
        torch._dynamo.reset()
        compiled.clear()
        cfg = dict(compile=dict(backend=backend, scope=scope))
        run(tmp_path / name, cfg=cfg, model=dict(type=Net, norm=True), custom_hooks=hook)
        counts[name] = len(compiled)
    assert counts["a"] == counts["b"] > 0
    assert_statistics(saved(tmp_path / "b"), [samples()[0]])


def test_statistics_are_recomputed_at_interval_and_last_epoch(tmp_path):
    seen = Seen()
    plain = run(
        tmp_path / "plain", model=dict(type=Net, norm=True), train_cfg=dict(by_epoch=True, max_epochs=1)
    )
    precise(
        tmp_path,
        interval=2,
        hooks=[seen],
        train_cfg=dict(by_epoch=True, max_epochs=3),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
    )
    assert_same(saved(tmp_path, 1), weights(plain))
    for epoch in (2, 3):
        assert_statistics(saved(tmp_path, epoch), [samples()[0]])


def test_resumed_run_matches_an_uninterrupted_run(tmp_path):
    whole = precise(tmp_path / "a", model=dict(type=Net, norm=True, dropout=0.3))
    model = dict(type=Net, norm=True, dropout=0.3)
    precise(tmp_path / "b", model=model, train_cfg=dict(by_epoch=True, max_epochs=1))
    assert_same(weights(whole), weights(precise(tmp_path / "b", model=model, resume=True)))


# ---- invalid input ------------------------------------------------------------------------------------


def test_model_without_batch_norm_logs_one_warning(tmp_path, capsys):
    plain = run(tmp_path / "a", log_level="WARNING")
    capsys.readouterr()
    precise_run = precise(tmp_path / "b", model=dict(type=Net), log_level="WARNING")
    assert "".join(capsys.readouterr()).count("the model has no BatchNorm layer with a moving average") == 1
    assert_same(weights(plain), weights(precise_run))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_samples=0), r"^custom_hooks\[0\]\.num_samples: must be an int of at least 1"),
        (dict(num_samples=8, interval=0), r"^custom_hooks\[0\]\.interval: must be an int of at least 1"),
        (dict(), "num_samples"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Runner(**training(tmp_path, custom_hooks=[dict(type="PreciseBNHook", **options)]))


def test_iteration_based_training_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"^custom_hooks\[0\]\.interval: counts epochs"):
        precise(tmp_path, train_cfg=dict(by_epoch=False, max_iters=2))


class Bare(nn.Module):
    """A model that defines `train_step` but not `loss_step`."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train_step(self, data, optim_wrapper):
        raise AssertionError("train_step was called")


def test_model_without_loss_step_is_rejected(tmp_path):
    with pytest.raises(ModelError, match="loss_step"):
        precise(tmp_path, model=Bare())
