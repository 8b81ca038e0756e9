"""Test that a Runner with `compile` scope 'step' matches an eager Runner in training, validation and resuming."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, Hook
from slipstream.optim import OptimWrapper
from slipstream.runner import Runner
from slipstream.step import EagerStep
from slipstream.step.graph import GraphStep
from slipstream.train_step import accelerate
from tiny_runs import (
    Losses,
    Net,
    Noisy,
    assert_same,
    loader,
    run,
    scalars,
    training,
    validation,
    weights,
)

GRAPH = dict(scope="step", backend="aot_eager")
SGD = dict(type="SGD", lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def close(one, other, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(weights(one), weights(other), rtol=rtol, atol=atol)


def both(tmp_path, **changes):
    """Train with and without the graph, and return both Runners. `custom_hooks` is called once for each of them."""
    hooks = changes.pop("custom_hooks", list)
    speed, found = changes.pop("speed", {}), []
    for name, how in (("graph", GRAPH), ("eager", None)):
        runner = run(tmp_path / name, custom_hooks=hooks(), speed=dict(speed, compile=how), **changes)
        found.append(runner)
    assert type(found[0].step) is GraphStep
    assert found[0].step.uses_graph
    assert type(found[1].step) is EagerStep
    return found


def test_graph_step_matches_the_eager_step(tmp_path):
    runner = run(tmp_path, speed=dict(compile=GRAPH))
    model = nn.Linear(2, 1)
    own = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, dict(compile=GRAPH))
    assert type(runner.step) is type(own.inner) is GraphStep
    plain = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, {})
    assert type(run(tmp_path / "eager").step) is type(plain.inner) is EagerStep


def everything(**changes):
    return dict(
        model=dict(type=Net, dropout=0.3, norm=True),
        optim_wrapper=dict(optimizer=SGD, clip_grad=dict(max_norm=0.3), accumulative_counts=2),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.2, end=4, by_epoch=False),
            dict(type="CosineAnnealingLR", by_epoch=True, convert_to_iter_based=True),
        ],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        **validation(),
        **changes,
    )


def test_every_option_matches_eager_mode(tmp_path):
    graph, eager = both(tmp_path, custom_hooks=lambda: [dict(type="EMAHook", momentum=0.2)], **everything())
    close(graph, eager)
    for mine, theirs in zip(scalars(graph), scalars(eager), strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs.keys() & {"loss", "grad_norm", "lr", "acc", "step"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert {"grad_norm", "acc"} <= {name for line in scalars(graph) for name in line}
    averages = [next(h for h in r.hooks if isinstance(h, EMAHook)).ema_model for r in (graph, eager)]
    torch.testing.assert_close(averages[0].state_dict(), averages[1].state_dict(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(averages[0].module.first.weight, graph.model.first.weight, atol=1e-3)
    assert not any("_orig_mod" in name for name in weights(graph))


# ---- stopping and resuming --------------------------------------------------------------------------------


def stopping(folder, compile, resume=False, optimizer=SGD):
    losses = Losses()
    checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=7, by_epoch=False))
    speed = dict(compile=compile, accumulate=2, ema=dict(type="threshold", decay=0.9))
    options = dict(
        model=dict(type=Net, dropout=0.3, norm=True),
        train_dataloader=loader(Noisy()),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=optimizer, clip_grad=dict(max_norm=0.5)),
        default_hooks=checkpoints,
        custom_hooks=[losses],
    )
    runner = run(folder, resume=resume, speed=speed, **options)
    ema = next(h for h in runner.hooks if isinstance(h, EMAHook)).ema_model
    return losses.by_iter, weights(runner), ema.state_dict(), runner


def average(found):
    return {name: value for name, value in found[2].items() if name != "steps"}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_run_resumed_inside_an_accumulation_window_is_bitwise_identical(tmp_path, backend):
    how = dict(scope="step", backend=backend)
    adamw = dict(type="AdamW", lr=0.01)
    whole = stopping(tmp_path / "whole", how, optimizer=adamw)
    rest = stopping(tmp_path / "rest", how, str(tmp_path / "whole/iter_7.pth"), adamw)
    assert min(rest[0]) == 8
    assert type(rest[3].step) is GraphStep
    assert rest[3].step.uses_graph
    assert_same({k: v for k, v in whole[0].items() if k > 7}, rest[0])
    assert_same(whole[1], rest[1])
    assert_same(whole[2], rest[2])


@pytest.mark.parametrize(("before", "after"), [(None, GRAPH), (GRAPH, None)])
def test_run_can_resume_with_a_different_compile_setting(tmp_path, before, after):
    whole = stopping(tmp_path / "whole", None)
    first = stopping(tmp_path / "first", before)
    rest = stopping(tmp_path / "rest", after, str(tmp_path / "first/iter_7.pth"))
    torch.testing.assert_close(first[0], whole[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rest[1], whole[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(average(rest), average(whole), rtol=1e-4, atol=1e-6)


# ---- hooks between steps --------------------------------------------------------------------------


class Unfreezes(Hook):
    """A hook that freezes the first layer in the first epoch, and the BatchNorm statistics from the second epoch on."""

    def before_train_epoch(self, runner):
        runner.model.first.requires_grad_(runner.epoch > 0)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.norm.train(runner.epoch == 0)


def test_hook_can_freeze_and_unfreeze_layers(tmp_path):
    class Kept(Hook):
        def __init__(self):
            self.first, self.mean = [], []

        def after_train_epoch(self, runner):
            self.first.append(runner.model.first.weight.clone())
            self.mean.append(runner.model.norm.running_mean.clone())

    model = dict(type=Net, norm=True)
    graph, eager = both(tmp_path, custom_hooks=lambda: [Unfreezes(), Kept()], model=model)
    close(graph, eager)
    kept = next(h for h in graph.hooks if isinstance(h, Kept))
    assert not torch.equal(*kept.first)
    assert torch.equal(*kept.mean)


class AddsGroup(Hook):
    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.model.last.requires_grad_(True)
            runner.optim_wrapper.optimizer.add_param_group(
                {"params": runner.model.last.parameters(), "lr": 0.3}
            )


def test_parameter_group_added_during_training_is_trained(tmp_path):
    def runner(name, how):
        made = Runner(**training(tmp_path / name, custom_hooks=[AddsGroup()], speed=dict(compile=how)))
        made.model.last.requires_grad_(False)
        made.optim_wrapper = OptimWrapper(
            torch.optim.SGD(made.model.first.parameters(), lr=0.1, momentum=0.9)
        )
        made.train()
        return made

    graph, eager = runner("graph", GRAPH), runner("eager", None)
    close(graph, eager)
    assert len(graph.optim_wrapper.param_groups) == 2


# ---- non-finite values --------------------------------------------------------------------------


# ---- models ------------------------------------------------------------------------------------------------


class Own(Net):
    def train_step(self, data, optim_wrapper):
        loss = self(*data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def test_model_with_an_overridden_train_step_rejects_step_scope(tmp_path):
    with pytest.raises(ConfigError, match=r"compile.scope: 'step' does not support Own, .*use scope='model'"):
        run(tmp_path, model=dict(type=Own), speed=dict(compile=GRAPH))
    own = run(tmp_path / "own", model=dict(type=Own), speed=dict(compile=dict(backend="eager")))
    close(own, run(tmp_path / "plain"))
