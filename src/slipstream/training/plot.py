"""The learning rates of a whole run as a picture, when the run begins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.dist import is_main_process
from slipstream.extras import is_installed
from slipstream.files import replacing
from slipstream.hooks import Hook
from slipstream.optim import OptimWrapperDict
from slipstream.optim.scheduler import build_param_scheduler
from slipstream.registry import HOOKS
from slipstream.training.schedules import RecipeLR

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["LrPlotHook"]

_POINTS = 2000
_SECONDS = 3.0
"""How long schedules may be walked through, of which each step follows from the one before: time of this thread."""


@HOOKS.register_module()
class LrPlotHook(Hook):
    """Write `lr_schedule.png` into the run's folder when a training starts: the learning rates of all its steps.

    Each distinct curve of the parameter groups is drawn once; where a resumed run goes on is marked. The schedules
    are built a second time, from their configurations, and walked through; where that cannot be (a schedule that is an
    object, or follows a metric; several optimizers; three seconds of computing do not suffice) the log says so.
    """

    filename = "lr_schedule.png"

    def before_train(self, runner: Runner) -> None:
        """Draw, on the main process; warn of a warm-up that never ends."""
        if not is_main_process():
            return
        _warn_of_climbs(runner)
        if not is_installed("matplotlib"):
            runner.logger.info(
                f"No {self.filename}: matplotlib is not installed; run: pip install 'slipstream[plots]'"
            )
            return
        steps = runner.max_iters
        points = sorted({round(i * (steps - 1) / (_POINTS - 1)) for i in range(_POINTS)})
        rates = _rates_ahead(runner, points)
        if isinstance(rates, str):
            runner.logger.info(f"No {self.filename}: {rates}")
            return
        unit = runner.train_loop.epoch_length if runner.by_epoch else 1
        draw(
            Path(runner.work_dir) / self.filename,
            [point / unit for point in [*points, steps]],
            # The last rate holds until the end of its step.
            {label: [*curve, curve[-1]] for label, curve in rates.items()},
            "epoch" if runner.by_epoch else "iteration",
            runner.iter / unit if runner.iter else None,
        )


def _warn_of_climbs(runner: Runner) -> None:
    courses = [s.course for s in runner.all_param_schedulers if isinstance(s, RecipeLR)]
    for course in courses:
        if course.only_climbs:
            epochs, steps = course.climbing_epochs, course.climbing_steps
            runner.logger.warning(
                f"The warm-up of the learning rate ({f'{epochs} epochs' if epochs else f'{steps} iterations'}) and its "
                f"cool-down ({course.lr_cooldown_epochs} epochs) take the whole run of {course.max_epochs} epochs: "
                f"set {'lr_warmup_epochs' if epochs else 'lr_warmup_steps'}=0, or fewer, for so short a run"
            )


def draw(
    path: Path, at: Sequence[float], rates: Mapping[str, Sequence[float]], unit: str, resumed: float | None
) -> None:
    """Write a PNG of the curves `rates`, by label, over the positions `at`, with a mark at `resumed`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, curve in rates.items():
        # After a space, since matplotlib takes a label that begins with an underscore for none.
        shown = f" {label}" if len(rates) > 1 else None
        axes.plot(at, curve, drawstyle="steps-post", linewidth=1.8, label=shown)
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
    axes.set_xlim(at[0], at[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(unit)
    axes.set_ylabel("learning rate")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(rates) > 1 or resumed is not None:
        figure.legend(loc="outside upper left", frameon=False, ncols=2)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _rates_ahead(runner: Runner, points: Sequence[int]) -> dict[str, list[float]] | str:
    """Return the learning rates at iterations `points` for each distinct curve, or why they are not known."""
    if isinstance(runner.optim_wrapper, OptimWrapperDict):
        return "there are several optimizers"
    given = runner._training["param_scheduler"]
    configured = given if isinstance(given, Sequence) else [] if given is None else [given]
    if not all(isinstance(cfg, Mapping) for cfg in configured):
        return "a schedule that is an object cannot be built a second time"
    if any(getattr(scheduler, "need_val_args", False) for scheduler in runner.all_param_schedulers):
        return "a schedule follows a metric"
    assert runner.optim_wrapper is not None
    optimizer, loop = _StandIn(runner.optim_wrapper.optimizer), runner.train_loop
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
    found = _values(schedulers, optimizer, points, loop.epoch_length if runner.by_epoch else loop.max_iters)
    if found is None:
        return f"to walk through the schedules takes more than {_SECONDS:g} s"
    return _distinct(optimizer.param_groups, list(zip(*found, strict=True)))


class _StandIn(torch.optim.Optimizer):
    """An optimizer's parameter groups as they were at first, and its defaults, without its parameters."""

    def __init__(self, original: torch.optim.Optimizer) -> None:
        plain = []
        for group in original.param_groups:
            options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            options["lr"] = options.get("initial_lr", options["lr"])
            plain.append({"params": [torch.zeros(())], **options})
        super().__init__(plain, original.defaults)


def _values(
    schedulers: Sequence[Any], optimizer: _StandIn, points: Sequence[int], epoch_length: int
) -> list[list[float]] | None:
    """Return the learning rates of the groups at each of the points; None if it takes too long."""
    if len(schedulers) == 1 and isinstance(schedulers[0], RecipeLR):
        return [schedulers[0].rates(point) for point in points]
    by_epoch = [scheduler for scheduler in schedulers if scheduler.by_epoch]
    by_iter = [scheduler for scheduler in schedulers if not scheduler.by_epoch]
    end, now, found = time.thread_time() + _SECONDS, 0, []
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
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


def _distinct(
    groups: Sequence[Mapping[str, Any]], curves: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return each curve once, under the names of its groups or their learning rate at first."""
    names: dict[tuple[float, ...], list[str]] = {}
    for group, curve in zip(groups, curves, strict=True):
        named = names.setdefault(tuple(curve), [])
        name = group.get("name", f"initial {group.get('initial_lr', group['lr']):g}")
        if name not in named:
            named.append(name)
    return {_shortened(", ".join(named)): list(curve) for curve, named in names.items()}


def _shortened(label: str) -> str:
    """Return a label of prefixes with no more than three of them."""
    words = label.split(", ")
    return label if len(words) <= 3 else f"{', '.join(words[:2])} and {len(words) - 2} more"


def _spans_decades(curves: Sequence[Sequence[float]]) -> bool:
    """Say whether a curve passes through two decades, or two curves lie further apart than that.

    The lowest tenth of a curve does not count: a decay to zero looks best on a linear axis.
    """
    positive = [sorted(rate for rate in curve if rate > 0) for curve in curves]
    lows = [curve[len(curve) // 10] for curve in positive if curve]
    tops = [curve[-1] for curve in positive if curve]
    far = any(top > 100 * low for top, low in zip(tops, lows, strict=True))
    return far or (bool(tops) and max(tops) > 30 * min(tops))
