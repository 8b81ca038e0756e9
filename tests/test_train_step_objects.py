"""Test that losses with `averaged_over` are weighted like the objects of one large batch."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.errors import LossError
from slipstream.optim import OptimWrapper
from slipstream.runner import Runner
from weighted_losses import (
    BATCHES,
    CLIP,
    WINDOW,
    Net,
    OwnStep,
    Samples,
    batches,
    from_whole_windows,
    make,
    mean_loss,
    sgd,
    train,
)

COMPILED = dict(compile=dict(backend="eager"))
BOTH = pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def assert_equal(weights, expected):
    torch.testing.assert_close(dict(weights), dict(expected), rtol=1e-12, atol=1e-14)


@BOTH
@pytest.mark.parametrize("more", [{}, dict(nan_guard="skip"), dict(sam=dict(rho=1e-15))], ids=str)
def test_window_equals_one_large_batch(options, more):
    assert_equal(train(**options, **more), from_whole_windows())


@BOTH
def test_window_without_parts_equals_one_large_batch(options):
    assert_equal(train(clip_grad=None, **options), from_whole_windows(float("inf")))


def test_float16_skips_no_more_updates_for_large_numbers():
    def large(scores, targets):
        losses = mean_loss(scores, targets)
        return {**losses, "averaged_over": losses["averaged_over"] * 10**6}

    (model, step), expected = make(large, precision="fp16"), from_whole_windows()
    scale = step.optim.loss_scale.scale.item()
    for batch in batches():
        step(batch)
    assert step.optim.loss_scale.scale.item() == scale
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=2e-3)


@BOTH
@pytest.mark.parametrize("stop", [4, 6])
def test_resumed_window_keeps_its_number_of_objects(options, stop):
    model, step = make(**options)
    for batch in batches()[:stop]:
        step(batch)
    state, weights = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
    for batch in batches()[stop : stop + 3]:
        step(batch)
    for other, continued in (
        make(**options),
        (model, step),
    ):  # also a step that has continued, with its graph
        other.load_state_dict(weights)
        continued.load_state_dict(copy.deepcopy(state))
        for batch in batches()[stop:]:
            continued(batch)
        assert_equal(other.state_dict(), from_whole_windows())


def run(folder, model, **options):
    wrapper = OptimWrapper(sgd(model), WINDOW, dict(max_norm=CLIP))
    parts = dict(
        train_dataloader=DataLoader(Samples(), 6),
        train_cfg=dict(by_epoch=False, max_iters=BATCHES),
        optim_wrapper=wrapper,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False)),
    )
    runner = Runner(model, folder, **parts | options)
    runner.train()
    return runner.model.net.state_dict()


@BOTH
def test_runner_equals_one_large_batch(tmp_path, options):
    assert_equal(run(tmp_path, Net(), speed=options), from_whole_windows())
    resumed = run(tmp_path / "resumed", Net(), speed=options, load_from=tmp_path / "iter_4.pth", resume=True)
    assert_equal(resumed, from_whole_windows())


def test_resume_with_half_the_batch_size_weights_both_parts_of_the_window(tmp_path):
    run(tmp_path, Net())
    model = Net()
    halves = dict(
        train_dataloader=DataLoader(Samples(), 3),
        train_cfg=dict(by_epoch=False, max_iters=2 * BATCHES),
        optim_wrapper=OptimWrapper(sgd(model), 2 * WINDOW, dict(max_norm=CLIP)),
    )
    resumed = run(tmp_path / "resumed", model, load_from=tmp_path / "iter_4.pth", resume=True, **halves)
    assert_equal(resumed, from_whole_windows())


def test_own_train_step_passes_the_number_to_update_params(tmp_path):
    assert_equal(run(tmp_path, OwnStep()), from_whole_windows())
    with pytest.raises(LossError, match=r"OwnStep.train_step returns 'averaged_over', but does not weight"):
        run(tmp_path, OwnStep(passes=False))


class OwnUpdate(OptimWrapper):
    def step(self, **kwargs):
        super().step(**kwargs)


def test_unsupported_use_is_refused_by_name(tmp_path):
    model = Net()
    with pytest.raises(LossError, match=r"OwnUpdate.step does not support"):
        run(tmp_path, model, optim_wrapper=OwnUpdate(sgd(model)))
    calls = []

    def sometimes(scores, targets):
        calls.append(0)
        losses = mean_loss(scores, targets)
        return losses if len(calls) % 2 else {"loss": losses["loss"]}

    _, step = make(sometimes)
    step(batches()[0])
    with pytest.raises(LossError, match="missing in some batches"):
        step(batches()[1])
