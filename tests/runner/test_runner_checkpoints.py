"""Tests of evaluating and loading checkpoints before training, and of model state that cannot be resumed."""

import pytest
import torch
from torch import nn

from slipstream.checkpoint import load_checkpoint
from slipstream.errors import CheckpointError, ConfigError, ModelError
from slipstream.hooks import EMAHook
from slipstream.runner import Runner
from tiny_runs import (
    Accuracy,
    Losses,
    Net,
    assert_same,
    loader,
    run,
    training,
    validation,
    weights,
)


class Drawn(Net):
    """A model with dropout whose `init_weights` draws random numbers."""

    def __init__(self):
        super().__init__(dropout=0.3)

    def init_weights(self):
        nn.init.normal_(self.first.weight, std=0.5)
        nn.init.normal_(self.last.weight, std=0.5)


def evaluated(work_dir, **changes):
    """Return a Runner that can train, validate and test, and the dict of its losses by step."""
    losses = Losses()
    test = dict(test_dataloader=loader(), test_cfg=dict(), test_evaluator=dict(type=Accuracy))
    options = training(work_dir, model=dict(type=Drawn), custom_hooks=[losses], **validation(), **test)
    return Runner(**{**options, **changes}), losses.by_iter


def assert_equal_training(one, other):
    """Train both Runners and check that all losses and weights are equal."""
    for runner, _ in (one, other):
        runner.train()
    assert len(one[1]) > 0
    assert_same(one[1], other[1])
    assert_same(weights(one[0]), weights(other[0]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(folder, model=dict(type=Net, dropout=0.3))
    return folder / "epoch_2.pth"


@pytest.mark.parametrize("mode", ["val", "test"])
def test_evaluation_before_training_does_not_change_training(tmp_path, mode):
    alone = evaluated(tmp_path / "alone")
    after = evaluated(tmp_path / "after")
    getattr(after[0], mode)()
    assert_equal_training(alone, after)


@pytest.mark.parametrize("partial", [False, True])
def test_load_checkpoint_before_training_equals_load_from(tmp_path, checkpoint, partial):
    if partial:  # init_weights must initialize the layer that the checkpoint does not contain
        content = torch.load(checkpoint, weights_only=True)["state_dict"]
        checkpoint = tmp_path / "partial.pth"
        torch.save({k: v for k, v in content.items() if not k.startswith("last.")}, checkpoint)
    expected = evaluated(tmp_path / "expected", load_from=checkpoint)
    called = evaluated(tmp_path / "called")
    called[0].load_checkpoint(checkpoint)
    assert_equal_training(expected, called)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state, "optimizer": {"state": {}}, "epoch": 3},
        lambda state: {"net": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"module": {f"_orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {
            "model": dict.fromkeys(state, torch.zeros(())),
            "ema": {"module": state, "updates": 4},
        },
        lambda state: {"model": state, "ema": {"decay": 0.9, "updates": 4}},
        lambda state: {"epoch": 3, **state},
    ],
    ids=["model", "net", "module", "ema", "settings", "flat"],
)
def test_weights_of_other_programs_load(tmp_path, checkpoint, wrap):
    content = torch.load(checkpoint, weights_only=True)["state_dict"]
    torch.save(wrap(content), tmp_path / "other.pth")
    runner = Runner(**training(tmp_path))
    runner.load_checkpoint(tmp_path / "other.pth", strict=True)
    assert_same(weights(runner), content)


def test_error_for_a_file_without_weights_names_its_keys(tmp_path):
    torch.save({"encoder": {"weight": torch.ones(1)}, "step": 4}, tmp_path / "other.pth")
    with pytest.raises(
        CheckpointError, match=r"contains no weights: none of its entries \['encoder', 'step'\]"
    ):
        Runner(**training(tmp_path)).load_checkpoint(tmp_path / "other.pth")


def complete(work_dir, **changes):
    """Return a Runner with an optimizer state, schedulers and a weight average, and the dict of its losses by step."""
    runner, losses = evaluated(
        work_dir,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.2, end=7, by_epoch=False),
            dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater", factor=0.5, patience=0),
        ],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False)),
        **changes,
    )
    runner.register_hook(EMAHook(momentum=0.1))
    return runner, losses


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("evaluation", [False, True])
def test_calling_resume_before_training_equals_the_resume_argument(tmp_path, seed, evaluation):
    whole = complete(tmp_path / "whole")
    whole[0].train()
    file = tmp_path / "whole" / "iter_3.pth"
    randomness = dict(randomness=dict(seed=seed))
    expected = complete(tmp_path / "expected", resume=file, **randomness)
    called = complete(tmp_path / "called", **randomness)
    called[0].resume(file)
    assert (called[0].iter, called[0].seed) == (3, 3)
    if evaluation:
        called[0].val()
    assert_equal_training(expected, called)
    assert_same(weights(called[0]), weights(whole[0]))
    assert_same(called[1], {step: loss for step, loss in whole[1].items() if step > 3})
    averages = [
        next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.state_dict()
        for runner, _ in (expected, called, whole)
    ]
    assert_same(averages[0], averages[1])
    assert_same(averages[0], averages[2])


class Counting(Net):
    """A model that saves its number of steps with a state_dict hook, and loads it with a pre-hook."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}steps": torch.tensor(module.steps)})
        )
        self.register_load_state_dict_pre_hook(self.load)

    @staticmethod
    def load(module, state, prefix, *_):
        module.steps = int(state.pop(f"{prefix}steps"))

    def forward(self, inputs, targets, mode):
        self.steps += self.training
        return {"loss": super().forward(inputs, targets, mode)["loss"] * self.steps}


@pytest.mark.parametrize("hooks", [[], [dict(type="EMAHook")]], ids=["weights", "average"])
def test_state_that_hooks_of_the_model_save_and_load_is_restored(tmp_path, hooks):
    options = dict(model=dict(type=Counting), custom_hooks=hooks)
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "run", **options, train_cfg=dict(by_epoch=True, max_epochs=1))
    resumed = run(tmp_path / "run", **options, resume=True)
    assert resumed.model.steps == 10
    assert_same(weights(whole), weights(resumed))


def test_state_that_cannot_be_restored_is_refused(tmp_path):
    net = Net()
    net.register_buffer("ones", torch.ones(1).expand(5))
    with pytest.raises(ModelError, match=r"buffer 'ones' is an expanded tensor.*tensor\.clone\(\)"):
        run(tmp_path, model=net)


def test_revise_keys_rename_the_weights_of_load_from_only(tmp_path, checkpoint):
    content = torch.load(checkpoint, weights_only=True)["state_dict"]
    other, keys = tmp_path / "other.pth", [(r"^student\.", "")]
    torch.save({"model": {f"student.{name}": value for name, value in content.items()}}, other)
    assert_same(load_checkpoint(other, revise_keys=keys)["state_dict"], content)
    options = dict(load_from=other, revise_keys=keys)
    runner = Runner(**training(tmp_path / "a", **options))
    runner.load_or_resume()
    assert_same(weights(runner), content)
    runner.train()
    again = Runner(**training(tmp_path / "a", resume=True, **{**options, "revise_keys": [("^", "x.")]}))
    again.load_or_resume()  # resumes from its own checkpoint, whose names are not changed
    assert_same(weights(again), weights(runner))
    for wrong in (["(", ""], "abc", [".*", "a"]):
        with pytest.raises(ConfigError, match=r"^revise_keys: "):
            Runner(**training(tmp_path / "b", load_from=other, revise_keys=[wrong])).load_or_resume()
