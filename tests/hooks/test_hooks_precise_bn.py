"""PreciseBNHook computes exact BatchNorm statistics and does not affect training."""

import pytest
import torch
import torch.nn.functional as F
from ema_runs import SCHEDULED, History, average_of
from torch.utils.data import TensorDataset

from slipstream.hooks import Hook
from tiny_runs import Net, Noisy, assert_same, loader, run, samples, validation, weights

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
