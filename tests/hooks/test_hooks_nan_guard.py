"""NanGuardHook: a run skips a bad batch, or stops and reports the module."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from slipstream.errors import ConfigError, NonFiniteLossError
from slipstream.hooks import Hook
from slipstream.optim import OptimWrapper, OptimWrapperDict
from tiny_runs import Net as RunNet
from tiny_runs import loader, run, samples

NAN, INF = math.nan, math.inf


class Breaks(RunNet):
    """A model with BatchNorm, whose loss is NaN if any sample of a batch contains NaN."""

    def __init__(self):
        super().__init__(norm=True)

    def forward(self, inputs, targets, mode):
        scores = self.last(F.relu(self.norm(self.first(inputs))))
        return {"loss": F.cross_entropy(scores, targets)} if mode == "loss" else scores


class Remember(Hook):
    priority = "LOWEST"

    def before_train(self, runner):
        self.weights = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.weights.append(copy.deepcopy(runner.model.state_dict()))


def broken_data():
    inputs, targets = samples()
    inputs = inputs.clone()
    inputs[0, 0] = NAN  # one batch per epoch contains this sample
    return TensorDataset(inputs, targets)


def train_on_broken_data(tmp_path, *hooks, **changes):
    return run(
        tmp_path,
        model=Breaks(),
        train_dataloader=loader(broken_data(), shuffle=False),
        custom_hooks=list(hooks),
        **changes,
    )


def test_run_skips_a_bad_batch_and_logs_it(tmp_path):
    remember = Remember()
    runner = train_on_broken_data(tmp_path, dict(type="NanGuardHook", action="skip"), remember)
    log = next(tmp_path.glob("*/*.log")).read_text()
    hook = next(h for h in runner.hooks if type(h).__name__ == "NanGuardHook")
    assert hook.skipped == 2
    assert runner.message_hub.get_scalar("train/skipped_steps").current() == 2
    assert "Skipped 1 step with a non-finite loss or gradient, up to iteration 5" in log
    for name, value in remember.weights[5].items():  # the first step of the second epoch
        assert torch.equal(value, remember.weights[4][name]), name
    assert not torch.equal(remember.weights[6]["last.weight"], remember.weights[5]["last.weight"])
    assert not runner.optim_wrapper.parts


class TrainsTwice(Breaks):
    """Updates the weights twice per batch."""

    def train_step(self, data, optim_wrapper):
        for _ in range(2):
            with optim_wrapper.optim_context(self):
                losses = self.loss_step(data)
            loss, logs = self.parse_losses(losses)
            optim_wrapper.update_params(loss)
        return logs


def test_each_skipped_update_of_an_own_train_step_restores_the_buffers(tmp_path):
    remember, model = Remember(), TrainsTwice()
    hooks = [dict(type="NanGuardHook", action="skip"), remember]
    run(tmp_path, model=model, train_dataloader=loader(broken_data(), shuffle=False), custom_hooks=hooks)
    for name, value in remember.weights[5].items():  # both updates of the first batch of the second epoch
        assert torch.equal(value, remember.weights[4][name]), name


class Fail(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        raise RuntimeError("power cut")


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_failed_run_removes_the_guard(tmp_path, action):
    model = Breaks()
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []

    class Look(Hook):
        def before_train(self, runner):
            found.append((runner.meter, list(optim.parts)))

    hooks = [dict(type="NanGuardHook", action=action), Look(), Fail()]
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path, model=model, optim_wrapper=optim, custom_hooks=hooks)
    ((meter, parts),) = found
    assert bool(parts) == (action == "skip")
    assert (optim.parts, meter.tolerant) == ([], False)


def test_run_without_guard_stops_at_a_non_finite_loss(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"iteration 1\. Lower the learning rate"):
        train_on_broken_data(tmp_path)


def test_skip_rejects_several_optimizers(tmp_path):
    model = Breaks()
    optim = OptimWrapperDict(a=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(
        ConfigError, match=r"custom_hooks\[0\]\.action: 'skip' of nan_guard supports only one optimizer"
    ):
        run(
            tmp_path,
            model=model,
            optim_wrapper=optim,
            custom_hooks=[dict(type="NanGuardHook", action="skip")],
        )
