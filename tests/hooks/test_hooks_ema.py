"""EMAHook: the average is validated and saved, and training uses the unaveraged weights."""

import pytest
import torch
from ema_runs import SCHEDULED, History, assert_close, average, average_of, ema_run, scheduled
from torch.nn.utils import prune

from slipstream.hooks import EMAHook, Hook
from slipstream.runner import Runner
from tiny_runs import Net, assert_same, loader, run, training, validation, weights


def test_validation_and_test_use_the_average_and_training_uses_the_weights(tmp_path):
    runner, history = ema_run(tmp_path / "a")
    assert_close(average(history.steps[:5], 0.2), history.validated[0])
    assert_close(average(history.steps, 0.2), history.validated[1])
    plain = run(tmp_path / "b")
    assert_same(weights(plain), weights(runner))
    runner.test()
    assert_close(average(history.steps, 0.2), history.validated[2])
    assert_same(weights(plain), weights(runner))


def test_checkpoint_has_the_average_as_state_dict_and_the_weights_as_ema_state_dict(tmp_path):
    _runner, history = ema_run(tmp_path)
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert_close(average(history.steps, 0.2), saved["state_dict"])
    for name, value in history.steps[-1].items():
        assert torch.equal(saved["ema_state_dict"][f"module.{name}"], value)
    other = Runner(**training(tmp_path / "b", load_from=tmp_path / "epoch_2.pth", **validation()))
    other.val()
    assert_same(weights(other), saved["state_dict"])


def test_averaging_starts_at_begin_iter(tmp_path):
    hook = dict(type="EMAHook", momentum=0.2, begin_iter=8)
    history = History()
    ema_run(tmp_path, custom_hooks=[hook, history])
    assert_same(history.validated[0], history.steps[4])  # averaging has not started
    assert_close(average(history.steps[7:], 0.2), history.validated[1])
    first, second = (torch.load(tmp_path / f"epoch_{n}.pth", weights_only=True) for n in (1, 2))
    assert_same(
        first["state_dict"], history.steps[4]
    )  # the current weights, because averaging has not started
    assert_close(average(history.steps[7:], 0.2), second["state_dict"])


def test_run_resumed_before_begin_iter_starts_averaging_at_begin_iter(tmp_path, capsys):
    hook = dict(type="EMAHook", momentum=0.2, begin_iter=8)
    whole = run(tmp_path / "a", custom_hooks=[hook])
    run(tmp_path / "b", train_cfg=dict(by_epoch=True, max_epochs=1), custom_hooks=[hook])
    parts = run(tmp_path / "b", custom_hooks=[hook], resume=True)
    assert "no 'ema_state_dict'" not in capsys.readouterr().out
    one, other = (next(h for h in r.hooks if isinstance(h, EMAHook)).ema_model for r in (whole, parts))
    assert_same(one.state_dict(), other.state_dict())


def test_best_checkpoint_contains_the_average(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="acc", rule="greater"))
    runner, history = ema_run(tmp_path, default_hooks=hooks, train_dataloader=loader(batch_size=20))
    name = runner.message_hub.get_info("best_ckpt/acc")
    saved = torch.load(tmp_path / name, weights_only=True)
    epoch = saved["meta"]["epoch"]
    assert_close(average(history.steps[: 2 * epoch], 0.2), saved["state_dict"])


def test_loaded_checkpoint_replaces_the_average(tmp_path):
    runner, _history = ema_run(tmp_path)
    runner.wait_for_checkpoint()
    runner.load_checkpoint(tmp_path / "epoch_1.pth")
    saved = torch.load(tmp_path / "epoch_1.pth", weights_only=True)["state_dict"]
    assert_same(dict(runner.averaged_model().state_dict()), saved)
    seen = []

    class Test(Hook):
        def after_test_epoch(self, runner, metrics=None):
            seen.append(weights(runner))

    runner.register_hook(Test())
    runner.test()
    assert_same(seen[0], saved)
    runner.save_checkpoint(tmp_path, "loaded.pth")
    assert_same(torch.load(tmp_path / "loaded.pth", weights_only=True)["state_dict"], saved)


class SeenWeights(Hook):
    """Stores the weights that a hook of the lowest priority sees after each validation."""

    priority = "LOWEST"

    def __init__(self):
        self.seen = []

    def after_val_epoch(self, runner, metrics=None):
        self.seen.append(weights(runner))


def test_hooks_after_validation_and_the_averaged_model_have_the_validated_weights(tmp_path):
    hook = SeenWeights()
    runner, history = ema_run(tmp_path, hook)
    for found, expected in zip(hook.seen, history.validated, strict=True):
        assert_same(found, expected)
    assert_same(weights(runner), history.steps[-1])
    assert_same(dict(runner.averaged_model().state_dict()), history.validated[-1])
    assert_same(weights(runner), history.steps[-1])


def test_averaged_model_of_a_pruned_network(tmp_path):
    net = Net()
    prune.random_unstructured(next(m for m in net.modules() if isinstance(m, torch.nn.Linear)), "weight", 0.5)
    runner = run(tmp_path, model=net)  # deepcopy does not support the pruned weight after a training step
    assert_same(dict(runner.averaged_model().state_dict()), weights(runner))


class Save(Hook):
    """A hook that saves a checkpoint at a stage of each validation."""

    priority = "HIGHEST"

    def __init__(self, stage):
        setattr(self, stage, self.save)

    def save(self, runner, **_):
        runner.save_checkpoint(runner.work_dir, f"val_{runner.epoch}.pth", by_epoch=None)


@pytest.mark.parametrize("stage", ["after_val_iter", "after_val_epoch"])
def test_checkpoint_saved_during_validation_equals_one_saved_before(tmp_path, stage):
    runner, history = ema_run(tmp_path, Save(stage), model=dict(type=Net, norm=True))
    for epoch in (1, 2):
        before, during = (
            torch.load(tmp_path / f"{name}_{epoch}.pth", weights_only=True) for name in ("epoch", "val")
        )
        assert_same(before["state_dict"], during["state_dict"])
        assert_same(before["ema_state_dict"], during["ema_state_dict"])
        assert_same(history.validated[epoch - 1], during["state_dict"])
    assert_same(history.steps[-1], weights(runner))


# ---- the averaged model -------------------------------------------------------------------------------


def test_compiled_and_eager_models_have_the_same_average(tmp_path):
    torch._dynamo.reset()
    options = dict(model=dict(type=Net, norm=True), train_dataloader=loader(batch_size=20))
    hook = dict(SCHEDULED, decay=0.7, decay_type="constant")
    runs = []
    for name, compiled in (("a", None), ("b", dict(compile=dict(backend="aot_eager")))):
        history = History()
        runner, _ = ema_run(tmp_path / name, **options, cfg=compiled, custom_hooks=[hook, history])
        runs.append((weights(runner), average_of(runner).module.state_dict(), history))
    (plain, plain_average, plain_history), (own, own_average, history) = runs
    assert_close(plain, own)
    assert_close(plain_average, own_average)
    assert_close(plain_history.validated[-1], history.validated[-1])
    assert not any("_orig_mod" in name for name in own_average)
    for name in ("first.weight", "norm.running_mean"):
        assert not torch.allclose(own_average[name], own[name], atol=1e-4)


class WithStatistics(Net):
    """A model with buffers of several dtypes that change with each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("lowest", torch.full((4,), torch.inf))
        self.register_buffer("recent", torch.zeros(4), persistent=False)

    def forward(self, inputs, targets, mode):
        if self.training:
            self.mean += inputs.detach().mean(0)
            self.recent.copy_(inputs[0])
            self.count += 1
            self.lowest.copy_(torch.minimum(self.lowest, inputs.amin(0)))
        return super().forward(inputs, targets, mode)


@pytest.mark.parametrize(
    "hook", [dict(type="EMAHook", momentum=0.3), dict(SCHEDULED, decay=0.7, decay_type="constant")]
)
def test_each_average_type_handles_buffers_as_documented(tmp_path, hook):
    history = History()
    ema_run(tmp_path, model=dict(type=WithStatistics), custom_hooks=[hook, history])
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    state, last = saved["state_dict"], history.steps[-1]
    mean = scheduled(history.steps, lambda s, total: 0.7)["mean"]
    torch.testing.assert_close(state["mean"], mean if "ema_type" in hook else last["mean"])
    assert torch.equal(saved["ema_state_dict"]["module.mean"], last["mean"])
    for name in ("count", "lowest"):
        assert torch.equal(state[name], last[name]), name
    assert "recent" not in state
    assert torch.isfinite(state["lowest"]).all()


# ---- invalid input ------------------------------------------------------------------------------------
