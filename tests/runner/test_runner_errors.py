"""Tests of the errors for invalid input, and of the configuration paths in these errors."""

import math
import warnings

import pytest
import torch
from torch import nn

from slipstream.config import Config
from slipstream.errors import (
    CheckpointError,
    ConfigError,
    LossError,
    NonFiniteLossError,
    SlipstreamError,
    UnknownNameError,
)
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner
from tiny_runs import Accuracy, Net, assert_same, loader, run, training, validation

SGD = dict(type="SGD", lr=0.1)
EPOCHS = dict(by_epoch=True, max_epochs=1)


@pytest.mark.parametrize(
    ("changes", "start", "hint"),
    [
        (dict(train_cfg=dict(max_epochs=2)), "train_cfg: ", "by_epoch=False (with max_iters)"),
        (dict(train_cfg=dict(by_epoch=True, max_epoch=2)), "train_cfg: ", "did you mean 'max_epochs'"),
        (dict(train_cfg=dict(by_epoch=True, max_epochs="abc")), "train_cfg.max_epochs: ", "'abc'"),
        (dict(train_cfg=dict(**EPOCHS, dynamic_intervals=[(9, 1), (3, 2)])), "train_cfg.dynamic_int", "ascending"),
        (dict(train_cfg=dict(type="EpochBasedTrainLop", max_epochs=1)), "train_cfg", "EpochBasedTrainLoop"),
        (dict(train_dataloader=loader(batch_siz=3)), "train_dataloader: ", "did you mean 'batch_size'"),
        (dict(train_dataloader=loader(batch_size=50, drop_last=True)), "", "drop_last"),
        (dict(train_dataloader=loader() | dict(collate_fn="defalt")), "train_dataloader.collate_fn: ", "defalt"),
        (dict(train_dataloader=3), "train_dataloader: ", "DataLoader, a dict or a list of batches"),
        (dict(optim_wrapper=dict(optimizer=dict(type="SDG", lr=1))), "optim_wrapper.optimizer: ", "'SGD'"),
        (dict(optim_wrapper=dict(optimizer=SGD, clip_grad=dict(max_nrm=1))), "optim_wrapper.clip_grad.max_nrm", "did"),
        (dict(optim_wrapper=5), "optim_wrapper: ", "int"),
        (dict(auto_scale_lr=dict(enable=True)), "auto_scale_lr.base_batch_size: ", "required if enable"),
        (dict(param_scheduler=[dict(type="ConstantLR"), dict(type="StepRL")]), "param_scheduler[1]: ", "StepLR"),
        (dict(custom_hooks=[Hook(), dict(type="EMAHook", ema_type="EMA")]), "custom_hooks[1]", "'EMA'"),
        (dict(custom_hooks=[dict(type="EMAHook", momentum=2.0)]), "custom_hooks[0]", "between 0 and 1"),
        (dict(custom_hooks=[dict(type="EMAHook", priority="HIHG")]), "custom_hooks[0]: ", "did you mean 'HIGH'"),
        (dict(custom_hooks=[Net]), "custom_hooks[0]: ", "Hook"),
        (dict(custom_hooks=[dict(type="EarlyStoppingHook", monitor="q")]), "custom_hooks[0].rule: ", "'q'"),
        (dict(default_hooks=dict(logger=dict(intervl=1))), "default_hooks.logger: ", "did you mean 'interval'"),
        (dict(default_hooks=dict(loger=dict(interval=1))), "default_hooks.loger: ", "did you mean 'logger'"),
        (dict(default_hooks=dict(checkpoint=dict(interval=0))), "default_hooks.checkpoint.interval: ", "save only"),
        (validation([dict(type=Accuracy), dict(type="Nope")]), "val_evaluator[1]: ", "Nope"),
        (validation(fp61=True), "val_cfg: ", "did you mean 'fp16'"),
        (dict(env_cfg=dict(cudnn_benchmrk=True)), "env_cfg.cudnn_benchmrk: ", "did you mean 'cudnn_benchmark'"),
        (dict(randomness=dict(seed="one")), "randomness.seed: ", "'one'"),
        (dict(cfg=dict(activation_checkpointing=["layer1"])), "activation_checkpointing.modules: ", "'layer1'"),
        (dict(speed=dict(precison="bf16")), "speed.precison: ", "did you mean 'precision'"),
        (dict(cfg=dict(compile=dict(bakend="eager"))), "compile.bakend: ", "did you mean 'backend'"),
        (dict(model=dict(type=Net, droput=0.1)), "model: ", "did you mean 'dropout'"),
        (dict(log_level="LOUD"), "log_level: ", "LOUD"),
        (dict(log_processor=dict(window_siz=2)), "log_processor: ", "window_size"),
        (dict(launcher="torchrun"), "", "torchrun"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("from_cfg", [False, True])
def test_config_errors_contain_the_config_path(tmp_path, changes, start, hint, from_cfg):
    arguments = training(tmp_path, **changes)
    if from_cfg and "cfg" in arguments:
        arguments |= arguments.pop("cfg")
    with pytest.raises(SlipstreamError) as raised:
        (Runner.from_cfg(Config(arguments)) if from_cfg else Runner(**arguments)).train()
    assert str(raised.value).startswith(start)
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("name", "third"), [("train", "optim_wrapper"), ("val", "val_evaluator"), ("test", "test_evaluator")]
)
def test_loop_arguments_must_be_set_together(tmp_path, name, third):
    whole = {f"{name}_dataloader": loader(), f"{name}_cfg": dict(EPOCHS), third: dict(optimizer=SGD)}
    for missing in whole:
        given = {key: value for key, value in whole.items() if key != missing}
        with pytest.raises(ValueError, match=f"must be set together, but {missing} is missing"):
            Runner(Net(), tmp_path, **given)


class Returning(Net):
    """A model that returns `answer(loss)` in mode 'loss'."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, inputs, targets, mode):
        return self.answer(super().forward(inputs, targets, "loss")["loss"]) if mode == "loss" else inputs


@pytest.mark.parametrize(
    ("answer", "error", "hint"),
    [
        (lambda loss: {"loss": loss.expand(3)}, LossError, r"'loss' has shape \(3,\)"),
        (lambda loss: {"loss_a": 3.0}, LossError, "'loss_a'"),
        (lambda loss: {"acc": loss}, LossError, "no entry has 'loss' in its name"),
        (lambda loss: loss, LossError, "dict"),
        (lambda loss: {"loss_a": loss, "loss_b": loss * math.nan}, NonFiniteLossError, "nan at iteration 1"),
    ],
)  # fmt: skip
def test_invalid_losses_are_rejected(tmp_path, answer, error, hint):
    with pytest.raises(error, match=hint) as raised:
        run(tmp_path, model=Returning(answer), default_hooks=dict(logger=dict(type="LoggerHook", interval=1)))
    assert "iteration 1 of training" in raised.value.__notes__[0]


class Poison(Hook):
    """A hook that makes a weight non-finite after a step, as an infinite gradient would."""

    priority = "HIGHEST"

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration:
            with torch.no_grad():
                runner.model.last.bias[0] = math.nan


@pytest.mark.parametrize(("iteration", "keep"), [(7, -1), (10, 1)])
def test_non_finite_weights_do_not_replace_good_checkpoints(tmp_path, iteration, keep):
    checkpoint = dict(type="CheckpointHook", interval=1, max_keep_ckpts=keep, save_best="acc")
    with pytest.raises(NonFiniteLossError, match="iteration") as raised:
        run(
            tmp_path,
            train_cfg=dict(by_epoch=True, max_epochs=3),
            default_hooks=dict(checkpoint=checkpoint),
            custom_hooks=[Poison(iteration), dict(type="EMAHook")],
            **validation(),
        )
    assert "last.bias" in str(raised.value) or "'loss' became nan at iteration 8" in str(raised.value)
    assert {p.name for p in tmp_path.glob("*.pth")} == {"epoch_1.pth", "best_acc_epoch_1.pth"}
    assert (tmp_path / "last_checkpoint").read_text().endswith("epoch_1.pth")
    for path in tmp_path.glob("*.pth"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values())


class Other(BaseModel):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 3)


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 5)


@pytest.mark.parametrize(
    ("other", "hint", "resume"),
    [
        (Other, "only.weight", False),
        (Other, "only.weight", True),
        (Wider, r"last.weight is \(3, 8\) in the checkpoint", True),
    ],
)
def test_checkpoint_of_a_different_model_is_rejected(tmp_path, other, hint, resume):
    run(tmp_path)
    with pytest.raises(CheckpointError, match=hint):
        run(tmp_path, model=dict(type=other), load_from=tmp_path / "epoch_2.pth", resume=resume)


def test_checkpoint_with_only_weights_cannot_be_resumed(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="load_from"):
        run(tmp_path, resume=str(tmp_path / "weights.pth"))
    twin = Net()
    twin.load_state_dict(torch.load(tmp_path / "weights.pth"))
    still = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)))
    loaded = run(tmp_path, load_from=tmp_path / "weights.pth", **still)
    assert_same(twin.state_dict(), loaded.model.state_dict())


def test_from_cfg_reads_a_file(tmp_path):
    (tmp_path / "config.py").write_text(f"work_dir = {str(tmp_path)!r}\nmodel = dict(type='Nett')")
    with pytest.raises(UnknownNameError, match="model: 'Nett'"):
        Runner.from_cfg(tmp_path / "config.py")
    with pytest.raises(ConfigError, match=r"other\.json does not exist"):
        Runner.from_cfg(str(tmp_path / "other.json"))


def test_run_that_cannot_start_does_not_write_its_configuration(tmp_path):
    def train(evaluator):
        arguments = training(tmp_path, **validation(evaluator))
        Runner.from_cfg(Config(arguments, filename="recipe.py")).train()

    with pytest.raises(UnknownNameError):
        train(dict(type="Acuracy"))
    assert not (tmp_path / "recipe.py").exists()  # it would replace the file of an earlier run
    train(dict(type=Accuracy))
    assert (tmp_path / "recipe.py").exists()


def test_runner_does_not_modify_its_arguments(tmp_path):
    arguments = training(tmp_path, **validation(), param_scheduler=[dict(type="StepLR", step_size=1)])
    before = repr({key: value for key, value in arguments.items() if key != "train_dataloader"})
    Runner(**arguments).train()
    assert repr({key: value for key, value in arguments.items() if key != "train_dataloader"}) == before
    assert set(arguments["train_dataloader"]) == set(loader())


@pytest.mark.parametrize(("world", "expected"), [("2", 1), ("1", 0)])
def test_missing_launcher_logs_a_warning(tmp_path, monkeypatch, world, expected):
    place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Runner(Net(), tmp_path, log_level="ERROR")
    said = [str(w.message) for w in caught if "launcher is 'none'" in str(w.message)]
    assert len(said) == expected
