"""Test that the learning rate plot matches the run's rates, and that rates unknown in advance are not plotted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.hooks import Hook
from slipstream.runner import Runner
from slipstream.training import plot
from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams
from slipstream.training.plot import LrPlotHook
from slipstream.training.schedules import lr_schedules
from tiny_runs import run, scalars, training

RECIPE = {"initial_lr": {"first": 0.01, "default": 0.1}, "lr_mode": "poly", "lr_warmup_epochs": 1}
MMENGINE = [
    dict(type="LinearLR", start_factor=0.1, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", T_max=2, begin=1),
]


class Seen(Hook):
    """A hook that records the learning rates of each step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.rates.append([float(group["lr"]) for group in runner.optim_wrapper.param_groups])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments of `draw`."""
    kept: dict[str, Any] = {}
    original = plot.draw

    def draw(path: Path, at: Any, rates: Any, unit: str, resumed: float | None) -> None:
        kept.update(path=path, at=at, rates=rates, unit=unit, resumed=resumed)
        original(path, at, rates, unit, resumed)

    monkeypatch.setattr(plot, "draw", draw)
    return kept


def recipe(**keys: Any) -> dict[str, Any]:
    params = TrainingParams.read({**RECIPE, "max_epochs": 3, **keys})
    return {"optim_wrapper": optim_wrapper(params), "param_scheduler": lr_schedules(params)}


def trained(folder: Path, **changes: Any) -> tuple[Runner, Seen]:
    seen = Seen()
    changes = {"train_cfg": dict(by_epoch=True, max_epochs=3), **changes}
    return run(folder, custom_hooks=[dict(type="LrPlotHook"), seen], **changes), seen


def test_curves_match_the_rates_of_the_steps(tmp_path: Path, drawn: dict[str, Any]) -> None:
    _, seen = trained(tmp_path, **recipe())
    assert list(drawn["rates"]) == ["first", "default"]
    for curve, steps in zip(drawn["rates"].values(), zip(*seen.rates, strict=True), strict=True):
        assert curve == pytest.approx([*steps, steps[-1]])
    assert drawn["at"] == pytest.approx([step / 5 for step in range(16)])
    assert (drawn["unit"], drawn["resumed"], drawn["path"]) == ("epoch", None, tmp_path / "lr_schedule.png")


def test_mmengine_schedules_are_simulated(tmp_path: Path, drawn: dict[str, Any]) -> None:
    optim = dict(
        optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=dict(custom_keys={"first": dict(lr_mult=0.5)})
    )
    _, seen = trained(tmp_path, optim_wrapper=optim, param_scheduler=MMENGINE)
    assert list(drawn["rates"]) == ["initial 0.05", "initial 0.1"]
    for curve, steps in zip(drawn["rates"].values(), zip(*seen.rates, strict=True), strict=True):
        assert curve[:-1] == pytest.approx(list(steps))


def test_iteration_based_training_is_plotted_over_iterations(tmp_path: Path, drawn: dict[str, Any]) -> None:
    schedule = dict(type="PolyLR", by_epoch=False, end=7)
    _, seen = trained(tmp_path, param_scheduler=schedule, train_cfg=dict(by_epoch=False, max_iters=7))
    assert (drawn["unit"], drawn["at"]) == ("iteration", list(range(8)))
    (curve,) = drawn["rates"].values()
    assert curve[:-1] == pytest.approx([rate for (rate,) in seen.rates])


def test_resumed_run_plots_all_steps_and_marks_the_resume_point(
    tmp_path: Path, drawn: dict[str, Any]
) -> None:
    whole, seen = trained(tmp_path / "whole", **recipe())
    first = str(tmp_path / "whole" / "epoch_2.pth")
    trained(tmp_path / "again", **recipe(), resume=first)
    assert drawn["resumed"] == 2.0
    curve = drawn["rates"]["default"]
    assert curve[:-1] == pytest.approx([rates[1] for rates in seen.rates])
    assert (tmp_path / "again" / "lr_schedule.png").exists()
    assert whole.iter == 15


def test_schedule_that_changes_momentum_is_plotted(tmp_path: Path, drawn: dict[str, Any]) -> None:
    cycle = {"OneCycleLR": {"phase": "TRAIN_BATCH_END", "max_lr": 0.1, "total_steps": 15}}
    _, seen = trained(tmp_path, **recipe(lr_mode=cycle, lr_warmup_epochs=0, initial_lr=0.1))
    (curve,) = drawn["rates"].values()
    assert curve[:-1] == pytest.approx([rate for (rate,) in seen.rates])


def test_plotting_does_not_change_the_run(tmp_path: Path) -> None:
    with_plot, _ = trained(tmp_path / "with", param_scheduler=MMENGINE)
    without = run(tmp_path / "without", param_scheduler=MMENGINE, train_cfg=dict(by_epoch=True, max_epochs=3))
    for one, other in zip(with_plot.model.parameters(), without.model.parameters(), strict=True):
        assert one.equal(other)


def test_long_run_is_plotted_with_at_most_2000_points(tmp_path: Path, drawn: dict[str, Any]) -> None:
    runner = Runner(
        **training(tmp_path, train_cfg=dict(by_epoch=True, max_epochs=5000), **recipe(max_epochs=5000))
    )
    runner._build_training()
    LrPlotHook().before_train(runner)
    assert len(drawn["at"]) == 2001
    assert (drawn["at"][0], drawn["at"][-1]) == (0, 5000)
    assert drawn["rates"]["default"][1000] == pytest.approx(0.1 * 0.5**0.9, rel=2e-3)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("depends on a metric", dict(param_scheduler=dict(type="ReduceOnPlateauLR", monitor="acc"))),
        ("took more than 0 s", dict(param_scheduler=MMENGINE)),
    ],
)
def test_unknown_rates_are_logged_instead_of_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(plot, "_SECONDS", 0.0)
    runner, _ = trained(tmp_path, log_level="INFO", **changes)
    logs = "".join(path.read_text() for path in Path(runner.log_dir).glob("*.log"))
    assert "lr_schedule.png was not saved: " in logs
    assert reason in logs
    assert not (tmp_path / "lr_schedule.png").exists()


# ---- the plot ----------------------------------------------------------------------------------------------


def colored(path: Path, color: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Return the rows and columns of the pixels that have the given color."""
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return np.argwhere(np.abs(image - color).sum(axis=2) < 40)


def test_plot_has_a_color_for_each_curve_and_a_legend_outside_the_axes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    at = [i / 10 for i in range(101)]
    falling = [1 - i / 100 for i in range(101)]
    plot.draw(path, at, {"_backbone": falling, "default": falling[::-1]}, "epoch", 5.0)
    assert Image.open(path).size == (960, 540)
    blue, orange = colored(path, (31, 119, 180)), colored(path, (255, 127, 14))
    legend, curve = blue[blue[:, 0] < 40], blue[blue[:, 0] > 60]
    assert len(legend) > 20  # the legend includes a name that starts with an underscore
    assert curve[curve[:, 1].argmin()][0] < curve[curve[:, 1].argmax()][0]  # the rate decreases
    assert len(orange) > 200
    alone = tmp_path / "b.png"
    plot.draw(alone, at, {"default": falling}, "epoch", None)
    assert colored(alone, (31, 119, 180))[:, 0].min() < 40  # a single curve has no legend


def test_rates_that_span_decades_use_a_logarithmic_axis() -> None:
    steps = [0.1] * 100 + [0.01] * 50 + [1e-4] * 50
    assert plot._spans_decades([steps])
    assert plot._spans_decades([[0.1] * 10, [1e-3] * 10])
    poly = [(1 - i / 200) ** 0.9 for i in range(200)]
    assert not plot._spans_decades([poly, [rate / 10 for rate in poly]])
    assert not plot._spans_decades([[0.0] * 10])


def test_long_list_of_prefixes_is_shortened() -> None:
    groups = [
        {"name": "a, b, c, d, e", "lr": 1.0},
        {"name": "a, b, c, d, e", "lr": 1.0},
        {"name": "f", "lr": 2.0},
    ]
    assert plot._distinct_curves(groups, [[1.0], [1.0], [2.0]]) == {"a, b and 3 more": [1.0], "f": [2.0]}


# ---- warm-ups that fill the run, rates by name --------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        (dict(lr_warmup_epochs=3), True),
        (dict(lr_warmup_epochs=2, lr_cooldown_epochs=1), True),
        (dict(lr_warmup_epochs=2), False),
        (dict(lr_warmup_epochs=0, lr_cooldown_epochs=1), False),
        (dict(lr_warmup_epochs=0, lr_warmup_steps=99, warmup_mode="LinearBatchLRWarmup"), False),
    ],
)
def test_warmup_that_fills_the_run_logs_a_warning(tmp_path: Path, keys: dict[str, Any], warned: bool) -> None:
    runner, _ = trained(tmp_path, **recipe(**keys), log_level="INFO")
    assert ("the whole run of 3 epochs; reduce lr_warmup_epochs, or set it to 0" in logged(runner)) == warned


def logged(runner: Runner) -> str:
    """Return the log file as one line."""
    (path,) = Path(runner.log_dir).glob("*.log")
    return " ".join(path.read_text(encoding="utf-8").split())


def test_each_learning_rate_is_logged_under_the_name_of_its_group(tmp_path: Path) -> None:
    keys = dict(lr_mode=None, lr_warmup_epochs=0)
    runner, _ = trained(tmp_path / "two", **recipe(**keys), log_level="INFO")
    assert {(line["lr/first"], line["lr/default"]) for line in scalars(runner)} == {(0.01, 0.1)}
    assert {line["lr"] for line in scalars(runner)} <= {0.01, 0.1}, "the value of 'lr' is wrong"
    assert " lr/first: 1.0000e-02 lr/default: 1.0000e-01 " in logged(runner)
    assert " lr: " not in logged(runner)


def test_single_learning_rate_is_logged_as_lr(tmp_path: Path) -> None:
    keys = dict(lr_mode=None, lr_warmup_epochs=0, initial_lr=0.1)
    runner, _ = trained(tmp_path, **recipe(**keys), log_level="INFO")
    assert {line["lr"] for line in scalars(runner)} == {0.1}
    assert not any(key.startswith("lr/") for line in scalars(runner) for key in line)
    assert " lr: 1.0000e-01 " in logged(runner)
