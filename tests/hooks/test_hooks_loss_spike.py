"""LossSpikeHook warns about losses far above their recent median, or rolls back to a checkpoint."""

import math
import random
import statistics

import pytest
import torch

from slipstream.errors import ConfigError, LossSpikeError
from slipstream.hooks import LossSpikeHook
from slipstream.logging import MessageHub, Meter
from slipstream.model import BaseModel
from tiny_runs import loader, run, weights


class FakeRunner:
    """The parts of a Runner that the hook uses with the action 'warn'."""

    def __init__(self):
        self.message_hub = MessageHub("run")
        self.meter, self.optim_wrapper, self.warnings = Meter(self.message_hub), object(), []
        self.logger = type("Logger", (), {"warning": lambda _, text: self.warnings.append(text)})()


def watched(losses, read_every=7, runner=None, **options):
    """Return the warnings of a hook that reads these losses every `read_every` steps."""
    runner = runner or FakeRunner()
    hook = LossSpikeHook(**options)
    hook.before_run(runner)
    hook.before_train(runner)
    for number, loss in enumerate(losses, 1):
        runner.meter.record({"loss": torch.tensor(loss)}, number)
        if number % read_every == 0 or number == len(losses):
            runner.meter.flush()
            hook.read_logs(runner)
    hook.release(runner)
    assert not runner.meter.on_read
    return runner.warnings


def noisy(count, seed=0):
    generator = random.Random(seed)
    return [2.0 + generator.gauss(0, 0.1) for _ in range(count)]


def test_one_warning_for_each_spike_names_its_first_step():
    losses = noisy(200)
    losses[100:110] = [9.0] * 10
    losses[150] = 4.0
    warnings = watched(losses)
    assert [text.split(" at iteration ")[1].split(",")[0] for text in warnings] == ["101", "151"]
    assert "'loss' rose to 9 at" in warnings[0]


def test_limit_is_the_median_plus_a_multiple_of_the_scaled_deviation():
    losses = noisy(60)
    middle = statistics.median(losses)
    mad = statistics.median(abs(loss - middle) for loss in losses)
    limit = middle + 5 * 1.4826 * mad
    assert watched([*losses, limit - 1e-4], threshold=5) == []
    assert len(watched([*losses, limit + 1e-4], threshold=5)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_falling_losses_are_not_spikes(seed):
    assert watched(noisy(1000, seed)) == []
    assert watched([math.exp(-step / 50) + 0.01 * loss for step, loss in enumerate(noisy(400, seed))]) == []


def test_rounding_errors_of_nearly_constant_losses_are_not_spikes():
    assert watched([2.0] * 60 + [2.0 + 1e-6, 2.19]) == []
    assert len(watched([2.0] * 60 + [2.21])) == 1


def test_too_few_losses_are_not_compared():
    assert watched([1.0] * 49 + [99.0]) == []
    assert len(watched([1.0] * 50 + [99.0])) == 1


def test_patience_is_the_number_of_consecutive_steps():
    losses = [*noisy(60), 9.0, 9.0, 2.0, 9.0, 9.0, 9.0, 2.0]
    warnings = watched(losses, patience=3)
    assert len(warnings) == 1
    assert "at iteration 66, above" in warnings[0]
    assert "for 3 consecutive steps (" in warnings[0]


def test_history_continues_after_a_resume():
    first = FakeRunner()
    watched(noisy(60), runner=first)
    resumed = FakeRunner()
    resumed.message_hub.load_state_dict(first.message_hub.state_dict())
    assert len(watched([9.0], runner=resumed)) == 1


@pytest.mark.parametrize("saved", [3, [[], []], [["x"], 0, 1], [[1.0], -1, 1], [[1.0], 1, "x"], [{}, 1, 1]])
def test_damaged_history_is_ignored(saved):
    runner = FakeRunner()
    runner.message_hub.update_info("loss_spike/loss", saved)
    assert watched([9.0] * 60, runner=runner) == []


@pytest.mark.parametrize("read_every", [1, 7, 100])
def test_first_step_of_a_spike_is_known_if_later_steps_have_no_finite_loss(read_every):
    class Rolling(FakeRunner):
        def __init__(self):
            super().__init__()
            self.rollback = type("Rollback", (), {"enable": lambda *_: None, "disable": lambda *_: None})()
            self.meter.tolerant = True

    hook, runner = LossSpikeHook(action="rollback", patience=3), Rolling()
    hook.before_run(runner)

    def read():
        for number, loss in enumerate([*noisy(60), 9.0, math.nan, math.inf, 9.0, 9.0], 1):
            runner.meter.record({"loss": torch.tensor(loss)}, number)
            if number % read_every == 0 or number == 65:
                runner.meter.flush()
                hook.read_logs(runner)

    with pytest.raises(LossSpikeError) as raised:
        read()
    assert raised.value.iteration == 61


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(action="stop"), "action"),
        (dict(window=0), "window"),
        (dict(threshold=0.0), "threshold"),
        (dict(threshold=math.nan), "threshold"),
        (dict(min_history=300), "min_history: must be at most window=200"),
        (dict(patience=0), "patience"),
        (dict(max_rollbacks=0), "max_rollbacks"),
        (dict(skip_before=-1), "skip_before"),
        (dict(monitor=3), "monitor"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        LossSpikeHook(**options)


class Spikes(BaseModel):
    """A model that multiplies its weights by 100 in the calls numbered in `spikes`, to simulate a bad update."""

    def __init__(self, spikes=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.spikes, self.calls = spikes, 0

    def forward(self, inputs, targets, mode):
        self.calls += 1
        if self.calls in self.spikes:
            with torch.no_grad():
                self.weight.mul_(100.0)
        return {"loss": ((self.weight - inputs) ** 2).mean()}


def train(folder, spikes=(), max_iters=60, **options):
    hook = dict(type="LossSpikeHook", window=20, min_history=10, **options)
    return run(
        folder,
        model=Spikes(spikes),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        train_dataloader=loader(),
        custom_hooks=[hook],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=7, by_epoch=False),
            logger=dict(type="LoggerHook", interval=5),
        ),
        log_level="WARNING",
    )


def test_run_rolls_back_to_before_the_spike(tmp_path):
    runner = train(tmp_path, [31], action="rollback")
    # The losses of steps 31 to 35 are read together. The update of step 30 may have caused the spike.
    assert runner.rollback.skipped == {30, 31, 32, 33, 34, 35}
    assert runner.iter == 60
    assert runner.message_hub.get_scalar("train/loss").max(30) < 5
    log = next(tmp_path.glob("*/*.log")).read_text()
    assert f"Rolling back to {tmp_path / 'iter_28.pth'}" in log
    quiet = train(tmp_path / "quiet")
    torch.testing.assert_close(weights(runner), weights(quiet), rtol=0, atol=0.3)


def test_action_warn_does_not_change_the_run(tmp_path, capsys):
    warned = train(tmp_path / "a", [31])
    assert "rose to" in capsys.readouterr().out
    assert warned.rollback.skipped == frozenset()
    assert not warned.meter.on_read


def test_recurring_spikes_end_the_run(tmp_path):
    with pytest.raises(
        LossSpikeError, match=r"rose to .*number of rollbacks has been reached .max_rollbacks=1"
    ) as raised:
        train(tmp_path, range(31, 100), action="rollback", max_rollbacks=1)
    assert raised.value.last >= raised.value.iteration > 28


def test_unknown_loss_is_rejected(tmp_path):
    with pytest.raises(
        ConfigError, match=r"custom_hooks\[0\].monitor: the model does not return 'los'; did you mean 'loss'"
    ):
        train(tmp_path, monitor="los")


def test_each_spike_is_reported_if_several_are_read_at_once():
    losses = noisy(120)
    losses[80] = losses[90] = 9.0
    assert len(watched(losses, read_every=50)) == 2


def test_losses_that_are_mostly_zero_have_no_spikes():
    assert watched([0.0] * 100 + [0.002] * 3) == []
