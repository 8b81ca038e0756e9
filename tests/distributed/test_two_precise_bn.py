"""Test that precise BatchNorm statistics and the mean of the best epochs match between two processes and one."""

import pytest
import torch
import torch.nn.functional as F
from sharded_runs import FSDP, SGD, Net, Samples, full, make
from two_processes import run_in_two

from slipstream.hooks import Hook
from slipstream.model import unwrap_model

STATISTICS = ("norm.running_mean", "norm.running_var")
STILL = dict(optimizer=dict(type="SGD", lr=0.0))


class OwnStatistics(Hook):
    """Store this rank's statistics and the stem after each epoch, before the statistics are averaged over the ranks."""

    priority = "LOW"

    def __init__(self):
        self.epochs = []

    def after_train_epoch(self, runner):
        state = unwrap_model(runner.model).state_dict()
        self.epochs.append(full({name: state[name] for name in (*STATISTICS, "stem.weight", "stem.bias")}))


def precise(folder, world, samples=20, optim=STILL, **cfg):
    """Train for two epochs. Return the BatchNorm statistics and the parameters of the stem after each epoch."""
    record, hook = OwnStatistics(), dict(type="PreciseBNHook", num_samples=samples)
    model = Net(norm=True)
    make(
        folder, world=world, model=model, optim=optim, cfg=cfg, custom_hooks=[hook, record], epochs=2
    ).train()
    return record.epochs


def plain(folder, world=2):
    return precise(folder, world, parallel="ddp" if world > 1 else None)


def few_samples(folder, world=2):
    return precise(folder, world, samples=8)


def synced(folder, world=2):
    return precise(folder, world, optim=SGD, sync_bn=world > 1)


def sharded(folder, world=2):
    return precise(folder, world, parallel=FSDP if world > 1 else None)


def averaged(folder, world, parallel=None):
    """Train for three epochs. Return the best two epochs, their mean and its metric, and the final weights."""
    hook = dict(type="AverageBestHook", metric="error", count=2)
    cfg = dict(parallel=parallel, sync_bn=world > 1)
    runner = make(folder, world=world, model=Net(norm=True), cfg=cfg, custom_hooks=[hook], epochs=3)
    runner.train()
    saved = torch.load(folder / "average_model.pth", weights_only=True)
    kept = [
        torch.load(folder / "average_best" / name, weights_only=True) for name in saved["meta"]["averaged"]
    ]
    return {
        "mean": saved["state_dict"],
        "kept": [dict(snapshot["state_dict"]) for snapshot in kept],
        "error": runner.message_hub.get_scalar("average_model/error").current(),
        "weights": full(dict(unwrap_model(runner.model).state_dict())),
    }


def averaged_ddp(folder, world=2):
    return averaged(folder, world, "ddp" if world > 1 else None)


def averaged_fsdp(folder, world=2):
    return averaged(folder, world, FSDP if world > 1 else None)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = [plain, few_samples, synced, sharded, averaged_ddp, averaged_fsdp]
    return run_in_two(functions, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("function", [plain, few_samples, synced, sharded])
def test_statistics_of_two_processes_match_one_process(answers, tmp_path, function):
    one = function(tmp_path, world=1)
    for two in answers[function.__name__]:
        assert isinstance(two, list), two
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "synced", "sharded"])
def test_statistics_include_all_samples_and_are_equal_on_both_ranks(answers, name):
    mine, theirs = answers[name]
    for own, other in zip(mine, theirs, strict=True):
        values = F.linear(Samples().x.double(), own["stem.weight"].double(), own["stem.bias"].double())
        for key, expected in zip(STATISTICS, (values.mean(0), values.var(0, correction=0)), strict=True):
            torch.testing.assert_close(own[key].double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(own[key], other[key])


@pytest.mark.parametrize("function", [averaged_ddp, averaged_fsdp])
def test_two_processes_write_and_validate_one_mean_of_the_best_epochs(answers, tmp_path, function):
    one = function(tmp_path, world=1)
    mine, theirs = answers[function.__name__]
    assert isinstance(mine, dict), mine
    for name, value in mine["mean"].items():
        parts = [snapshot[name].double() for snapshot in mine["kept"]]
        assert len(parts) == 2
        if value.is_floating_point():
            assert torch.equal(value, (sum(parts) / 2).to(value.dtype)), name
            assert torch.equal(mine["weights"][name], theirs["weights"][name]), name
    torch.testing.assert_close(mine["mean"], one["mean"], rtol=1e-4, atol=1e-6)
    assert mine["error"] == theirs["error"] == pytest.approx(one["error"], rel=1e-4)
