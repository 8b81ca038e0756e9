"""Tests of combinations of options in two processes."""

import pytest
import torch
from sharded_runs import FSDP, SGD, Net, Record, assert_same, full, make, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import run_in_two

from slipstream.hooks import EMAHook
from slipstream.model import BaseModel, unwrap_model
from slipstream.optim import OptimWrapper

pytestmark = pytest.mark.slow  # starts processes and takes more than ten seconds

WINDOWS = dict(SGD, accumulative_counts=2)
EMA = dict(type="EMAHook", momentum=0.2)


# ---- all options combined ------------------------------------------------------------------------------


def all_options(folder, parallel=FSDP, world=2, **precision):
    cfg = dict(parallel=parallel, sync_bn="torch", compile=dict(backend="eager"))
    return train(folder, world=world, model=Net(norm=True), optim=WINDOWS | precision, ema=True, cfg=cfg)


def sharded(folder):
    return all_options(folder)


def replicated(folder):
    return all_options(folder, None)


def resumed(folder):
    """Train with all options, and resume from a checkpoint within an epoch and an accumulation window."""

    def run(name, **changes):
        checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=7, by_epoch=False))
        cfg = dict(parallel=FSDP, sync_bn="torch", compile=dict(backend="eager"))
        changes = dict(changes, custom_hooks=[Record(), EMA], default_hooks=checkpoints, cfg=cfg)
        runner = make(folder / name, world=2, model=Net(norm=True), optim=WINDOWS, **changes)
        runner.train()
        record = next(hook for hook in runner.hooks if isinstance(hook, Record))
        weights = full(dict(unwrap_model(runner.model).state_dict()))
        return torch.stack(record.losses), record.errors, weights

    return run("whole"), run("rest", resume=str(folder / "whole" / "iter_7.sharded"))


# ---- a model with an overridden train_step ------------------------------------------------------------


class Gan(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def train_step(self, data, optim_wrapper):
        real, _ = self.data_preprocessor(data, True)
        generator, discriminator = optim_wrapper["generator"], optim_wrapper["discriminator"]
        with discriminator.optim_context(self.discriminator):
            fake = self.generator(real + 1)
            scores = self.discriminator(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.zeros(len(real), 1), torch.ones(len(real), 1)])
        discriminator.update_params((scores - truth).square().mean())
        self.discriminator.requires_grad_(False)
        with generator.optim_context(self.generator):
            loss = self.discriminator(self.generator(real + 1)).square().mean()
        generator.update_params(loss)
        self.discriminator.requires_grad_(True)
        return {"loss": loss.detach()}

    def forward(self, x, y, mode):
        return self.generator(x).sum(1, keepdim=True) - y


def gan(folder, world=2, **wrapper):
    model = Gan()
    parts = {name: getattr(model, name).parameters() for name in ("generator", "discriminator")}
    optim = {
        name: OptimWrapper(torch.optim.SGD(own, lr=0.1), accumulative_counts=2) for name, own in parts.items()
    }
    cfg = dict(sync_bn="torch", model_wrapper_cfg=wrapper or None)
    runner = make(folder, world=world, model=model, optim=optim, param_scheduler=None, ema=True, cfg=cfg)
    runner.train()
    record = next(hook for hook in runner.hooks if isinstance(hook, Record))
    average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
    assert not any(isinstance(module, DistributedDataParallel) for module in average.modules())
    weights = full({"own": dict(model.state_dict()), "average": dict(average.state_dict())})
    return {
        "weights": weights,
        "losses": torch.stack(record.losses),
        "errors": record.errors,
        "norms": None,
        "optimizer": {},
    }


# ---- communication hooks and loss scale ---------------------------------------------------------------


# ---- ranks with different batches or errors -----------------------------------------------------------


FUNCTIONS = [
    sharded, replicated, resumed, gan,
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two(FUNCTIONS, tmp_path_factory.mktemp("options"))


def of_both(answers, function):
    first, second = answers[function.__name__]
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    return first, second


@pytest.mark.parametrize("function", [sharded, replicated])
def test_all_options_combined_match_one_process(answers, function, tmp_path):
    first, second = of_both(answers, function)
    assert_same(first, second, steps=20)
    assert_same(first, all_options(tmp_path, None, world=1), rtol=1e-5, atol=1e-6, steps=20)


def test_run_with_all_options_resumes_within_an_epoch_and_a_window(answers):
    (losses, errors, weights), (rest, later, ends) = of_both(answers, resumed)[0]
    # The window's gradients are summed over the ranks before saving, which adds a rounding error.
    torch.testing.assert_close(rest, losses[7:], rtol=1e-5, atol=0)
    assert later == pytest.approx(errors[-len(later) :], rel=1e-5)
    torch.testing.assert_close(ends, weights, rtol=1e-5, atol=1e-6)


def test_gan_with_averages_accumulation_and_sync_bn_matches_one_process(answers, tmp_path):
    first, second = of_both(answers, gan)
    assert_same(first, second, steps=20)
    assert_same(first, gan(tmp_path, world=1), rtol=1e-4, atol=1e-5, steps=20)
