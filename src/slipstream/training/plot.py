"""Plot the learning rate schedule of the whole run when training starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.dist import is_main_process
from slipstream.extras import is_installed
from slipstream.files import atomic_write
from slipstream.hooks import Hook
from slipstream.optim import OptimWrapperDict
from slipstream.optim.scheduler import all_schedulers, build_param_scheduler
from slipstream.registry import HOOKS
from slipstream.training.schedules import RecipeLR

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["LrPlotHook"]

_POINTS = 2000
_SECONDS = 3.0
"""Maximum CPU time in seconds for simulating schedules that have no closed form."""


@HOOKS.register_module()
class LrPlotHook(Hook):
    """Save a plot of the learning rate schedule as `lr_schedule.png` when training starts.

    Parameter groups with identical schedules share one curve. If the run was resumed, the plot marks the iteration at
    which it continued. The hook rebuilds the schedules from their configurations to compute the curves. It does not
    support schedule objects, schedules that depend on a metric, multiple optimizers, or simulations that take longer
    than 3 seconds. In these cases, the hook logs the reason instead of saving a plot.
    """

    filename = "lr_schedule.png"

    def before_train(self, runner: Runner) -> None:
        """Save the plot in the main process. Warn if warm-up and cool-down cover the whole run."""
        if not is_main_process():
            return
        _warn_if_warmup_only(runner)
        if not is_installed("matplotlib"):
            runner.logger.info(
                f"{self.filename} was not saved: matplotlib is not installed; run: pip install 'slipstream[plots]'"
            )
            return
        steps = runner.max_iters
        points = sorted({round(i * (steps - 1) / (_POINTS - 1)) for i in range(_POINTS)})
        rates = _simulated_rates(runner, points)
        if isinstance(rates, str):
            runner.logger.info(f"{self.filename} was not saved: {rates}")
            return
        unit = runner.train_loop.epoch_length if runner.by_epoch else 1
        draw(
            Path(runner.work_dir) / self.filename,
            [point / unit for point in [*points, steps]],
            # The last rate applies until the end of its step.
            {label: [*curve, curve[-1]] for label, curve in rates.items()},
            "epoch" if runner.by_epoch else "iteration",
            runner.iter / unit if runner.iter else None,
        )


def _warn_if_warmup_only(runner: Runner) -> None:
    schedules = [s.schedule for s in all_schedulers(runner.param_schedulers) if isinstance(s, RecipeLR)]
    for schedule in schedules:
        if schedule.is_warmup_only:
            epochs, steps = schedule.warmup_epochs, schedule.warmup_batches
            runner.logger.warning(
                f"The learning rate warm-up ({_count(epochs, 'epoch') if epochs else _count(steps, 'iteration')}) "
                f"and cool-down ({_count(schedule.lr_cooldown_epochs, 'epoch')}) cover the whole run of "
                f"{_count(schedule.max_epochs, 'epoch')}; "
                f"reduce {'lr_warmup_epochs' if epochs else 'lr_warmup_steps'}, or set it to 0"
            )


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def draw(
    path: Path,
    positions: Sequence[float],
    rates: Mapping[str, Sequence[float]],
    unit: str,
    resumed: float | None,
) -> None:
    """Save a PNG plot of `rates` (curves by label) over `positions`. Mark the position `resumed`, if any."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, curve in rates.items():
        # The leading space is needed because matplotlib hides labels that start with an underscore.
        curve_label = f" {label}" if len(rates) > 1 else None
        axes.plot(positions, curve, drawstyle="steps-post", linewidth=1.8, label=curve_label)
    if resumed is not None:
        axes.axvline(
            resumed,
            color="0.35",
            linestyle="--",
            linewidth=1.2,
            label=f" resumed at {unit} {round(resumed, 1):g}",
        )
    if _spans_decades(list(rates.values())):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(positions[0], positions[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(unit)
    axes.set_ylabel("learning rate")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(rates) > 1 or resumed is not None:
        figure.legend(loc="outside upper left", frameon=False, ncols=2)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")


def _simulated_rates(runner: Runner, points: Sequence[int]) -> dict[str, list[float]] | str:
    """Return the learning rates of each distinct curve at `points`, or the reason why they are not available."""
    if isinstance(runner.optim_wrapper, OptimWrapperDict):
        return "multiple optimizers are not supported"
    schedules = runner._training["param_scheduler"]
    configured = schedules if isinstance(schedules, Sequence) else [] if schedules is None else [schedules]
    if not all(isinstance(cfg, Mapping) for cfg in configured):
        return "schedule objects cannot be rebuilt"
    if any(
        getattr(scheduler, "need_val_args", False) for scheduler in all_schedulers(runner.param_schedulers)
    ):
        return "a schedule depends on a metric"
    assert runner.optim_wrapper is not None
    optimizer, loop = _OptimizerStub(runner.optim_wrapper.optimizer), runner.train_loop
    schedulers = [
        build_param_scheduler(
            cfg,
            optimizer,
            epoch_length=loop.epoch_length,
            max_epochs=loop.max_epochs,
            max_iters=loop.max_iters,
        )
        for cfg in configured
    ]
    rates = _values(schedulers, optimizer, points, loop.epoch_length if runner.by_epoch else loop.max_iters)
    if rates is None:
        return f"simulating the schedules took more than {_SECONDS:g} s"
    return _distinct_curves(optimizer.param_groups, list(zip(*rates, strict=True)))


class _OptimizerStub(torch.optim.Optimizer):
    """An optimizer with the initial group options and the defaults of another optimizer, but with dummy parameters."""

    def __init__(self, original: torch.optim.Optimizer) -> None:
        plain = []
        for group in original.param_groups:
            options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            options["lr"] = options.get("initial_lr", options["lr"])
            plain.append({"params": [torch.zeros(())], **options})
        super().__init__(plain, original.defaults)


def _values(
    schedulers: Sequence[Any], optimizer: _OptimizerStub, points: Sequence[int], epoch_length: int
) -> list[list[float]] | None:
    """Return the learning rates of the groups at each point, or None if the simulation takes too long."""
    if len(schedulers) == 1 and isinstance(schedulers[0], RecipeLR):
        return [schedulers[0].rates(point) for point in points]
    by_epoch = [scheduler for scheduler in schedulers if scheduler.by_epoch]
    by_iter = [scheduler for scheduler in schedulers if not scheduler.by_epoch]
    end, now, rates = time.thread_time() + _SECONDS, 0, []
    for point in points:
        for step in range(now, point):
            for scheduler in by_iter:
                scheduler.step()
            if (step + 1) % epoch_length == 0:
                for scheduler in by_epoch:
                    scheduler.step()
        if time.thread_time() > end:
            return None
        now = point
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def _distinct_curves(
    groups: Sequence[Mapping[str, Any]], curves: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return the distinct curves, labeled with their group names or initial learning rates."""
    names: dict[tuple[float, ...], list[str]] = {}
    for group, curve in zip(groups, curves, strict=True):
        group_names = names.setdefault(tuple(curve), [])
        name = group.get("name", f"initial {group.get('initial_lr', group['lr']):g}")
        if name not in group_names:
            group_names.append(name)
    return {_shorten(", ".join(group_names)): list(curve) for curve, group_names in names.items()}


def _shorten(label: str) -> str:
    """Return the label. If it lists more than three prefixes, keep the first two and a count of the others."""
    prefixes = label.split(", ")
    return label if len(prefixes) <= 3 else f"{', '.join(prefixes[:2])} and {len(prefixes) - 2} more"


def _spans_decades(curves: Sequence[Sequence[float]]) -> bool:
    """Return whether a curve spans more than two decades, or the maxima differ by more than a factor of 30.

    The lowest 10% of each curve is ignored, because a decay to zero looks best on a linear axis.
    """
    positive = [sorted(rate for rate in curve if rate > 0) for curve in curves]
    lows = [curve[len(curve) // 10] for curve in positive if curve]
    tops = [curve[-1] for curve in positive if curve]
    is_wide = any(top > 100 * low for top, low in zip(tops, lows, strict=True))
    return is_wide or (bool(tops) and max(tops) > 30 * min(tops))
