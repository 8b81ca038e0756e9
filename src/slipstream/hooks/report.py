"""Record a run, and write a report at its end."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from slipstream.dist import is_main_process
from slipstream.errors import DataError
from slipstream.hooks.checkpoint import CheckpointHook
from slipstream.hooks.hook import Hook
from slipstream.logging import STEP_PHASES, PhaseTimes
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapper
from slipstream.preemption import Preempted
from slipstream.registry import HOOKS
from slipstream.scalars import is_learning_rate
from slipstream.step import CompiledStep, EagerStep
from slipstream.typecheck import matches
from slipstream.version import __version__

if TYPE_CHECKING:  # imported when a run starts, because the import of the Runner must stay fast
    from slipstream.report.record import Confusion, Curve, RunRecord, Status
    from slipstream.runner import Runner

_TIMESTAMP = re.compile(
    r"\d{8}_\d{6}(_\d+)?$"
)  # ends an experiment name, and is the name of the run's log folder
_MAX_CLASSES = 200
_MEMORY_INTERVAL = 1.0  # seconds; a measurement can take longer than the rest of the hook's work


@HOOKS.register_module()
class ReportHook(Hook):
    """Write `report.json` and `report.html` to the run's log folder at the end of the run, even after an error.

    The hook does not add a device synchronization to training steps. It copies values from the message hub when the
    Runner reads the losses, and after each evaluation. The report is described in docs/report.md.
    """

    priority = "VERY_LOW"
    reads_phases = True

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._inherited: set[str] = set()  # curves of the earlier run to which no value has been added
        self._num_read: dict[str, int] = {}
        self._speed_start = 0, 0.0  # samples and seconds at the last speed point, without step 1
        self._last_memory_time = -math.inf
        self._confusions: dict[tuple[str, str], Confusion] = {}
        self._start: int | None = None
        self._status: tuple[Status, str] | None = None
        self._training = False

    def before_train(self, runner: Runner) -> None:
        """Skip the values that were loaded when the run was resumed.

        The curves of a resumed run begin with those of the run that wrote the checkpoint.
        """

        self._start, self._training = runner.iter, True
        self._speed_start = runner.phases.samples, _seconds_of_steps(runner.phases)
        self._num_read = {key: history.total for key, history in runner.message_hub.log_scalars.items()}
        if is_main_process() and runner.checkpoints.resumed_from is not None:
            earlier = _earlier_curves(runner)
            self._curves |= earlier
            self._inherited = set(earlier)

    def read_logs(self, runner: Runner) -> None:
        """Extend the curves with the values recorded since the last call. All values are on the host."""
        if not self._training or not is_main_process():
            return
        iteration = runner.meter.newest or self._start or 0
        for key, history in runner.message_hub.log_scalars.items():
            new = history.total - self._num_read.get(key, 0)
            if new and key.startswith("train/"):
                # Learning rates are also recorded before checkpoints and at the end, so add only the latest value.
                values = history.newest(1 if is_learning_rate(key) else new)
                self._curve(key).add(iteration, reversed(values))  # in step order
            self._num_read[key] = history.total
        samples, seconds = runner.phases.samples, _seconds_of_steps(runner.phases)
        if samples > self._speed_start[0] and seconds > self._speed_start[1]:
            speed = (samples - self._speed_start[0]) / (seconds - self._speed_start[1])
            self._curve("speed/images_per_second").add(iteration, [speed])
            self._speed_start = samples, seconds
        if runner.phases.steps and perf_counter() - self._last_memory_time >= _MEMORY_INTERVAL:
            self._last_memory_time = perf_counter()
            for name, mebibytes in _memory(runner.device).items():
                self._curve(f"memory/{name}").add(iteration, [mebibytes])

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices."""
        self._read_metrics(runner, "val", runner.val_loop, metrics)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices."""
        self._read_metrics(runner, "test", runner.test_loop, metrics)

    def release(self, runner: Runner) -> None:
        """Write the report."""
        if not is_main_process():
            return
        from slipstream.report import write_report

        try:
            self.read_logs(runner)  # after a non-finite loss, the latest values are only in the message hub
            if self._status is None or self._training:  # the status of training outranks that of a later test
                error = runner.error
                kind: Status = (
                    "failed" if isinstance(error, Exception) else "interrupted" if error else "finished"
                )
                self._status = kind, f"{type(error).__name__}: {error}".removesuffix(": ") if error else ""
            write_report(self._record(runner, *self._status), Path(runner.log_dir))
        except Exception as error:  # a failed report must neither stop the run nor hide an error in it
            runner.logger.warning(
                f"The report cannot be written: {type(error).__name__}: {error}", exc_info=True
            )
        self._training = False

    def _read_metrics(self, runner: Runner, mode: str, loop: Any, metrics: dict[str, float] | None) -> None:
        if not is_main_process():
            return
        from slipstream.report.record import Confusion

        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._curve(self._curve_name(f"{mode}/{name}", runner.iter)).add(runner.iter, [value])
        # A user-defined loop may have no evaluator, and a user-defined metric may use `confusion` for other values.
        evaluators = getattr(loop, "evaluators", {"": getattr(loop, "evaluator", None)}).items()
        parts = [(loader, metric) for loader, part in evaluators for metric in getattr(part, "metrics", ())]
        for loader, metric in parts:
            matrix: Any = getattr(metric, "confusion", None)
            name = " ".join(filter(None, (loader, metric.prefix, type(metric).__name__)))
            recent = [c for c in self._confusions.values() if (c.mode, c.iteration) == (mode, runner.iter)]
            if not matches(matrix, list[list[int]]) or len(matrix) > _MAX_CLASSES:
                continue
            if any(matrix == other.matrix or name == other.metric for other in recent):
                continue
            get_names = getattr(metric, "class_names", None)
            names = list(map(str, get_names() if callable(get_names) else ()))
            names = names if len(names) == len(matrix) else list(map(str, range(len(matrix))))
            self._confusions[mode, name] = Confusion(name, mode, runner.iter, names, matrix)

    def _curve_name(self, key: str, iteration: int) -> str:
        """Return the name of a metric's curve: a second evaluation at the same iteration gets its own curve."""
        curve = self._curves.get(key)
        if curve is not None and key in self._inherited:
            self._inherited.remove(key)
            curve.truncate(iteration - 1)  # a resumed run may repeat the evaluation at the checkpoint
        return f"{key} (second evaluation)" if curve and curve.x and curve.x[-1] == iteration else key

    def _curve(self, key: str) -> Curve:
        from slipstream.report.record import Curve

        return self._curves.setdefault(key, Curve())

    def _record(self, runner: Runner, status: Status, error: str) -> RunRecord:
        from slipstream.report.files import flat_config, read_log
        from slipstream.report.record import OptionRow, PhaseSplit, RunRecord
        from slipstream.speed.plan import option_rows

        log, phases, trained = read_log(Path(runner.log_dir)), runner.phases, self._start is not None
        saved = runner.error.iteration if isinstance(runner.error, Preempted) else None
        resumed = runner.checkpoints.resumed_from
        return RunRecord(
            name=runner.experiment_name,
            status=status,
            error=error,
            started=log.started,
            seconds=sum(phases.seconds.values()) + sum(phases.first.values()),
            environment={"slipstream": __version__, "seed": str(runner.seed), **log.environment},
            settings=_settings(runner) if trained else {"device": runner.device.type},
            step=_describe_step(runner) if trained else "",
            iteration=runner.iter
            if saved is None
            else saved,  # a signal ends the run before its last step counts
            max_iterations=runner.max_iters if trained and runner.knows_length else 0,
            epoch=runner.epoch,
            max_epochs=runner.max_epochs if trained and runner.by_epoch else 0,
            start_iteration=self._start or 0,
            resumed_from=resumed.name if resumed else "",
            phases=PhaseSplit(
                {str(name): seconds for name, seconds in phases.seconds.items()},
                {str(name): seconds for name, seconds in phases.first.items()},
                phases.steps,
                phases.samples,
            ),
            curves=self._curves,
            confusions=list(self._confusions.values()),
            options=[OptionRow(*row) for row in option_rows(runner.speed)],
            messages=log.messages,
            config=flat_config(runner.user_config),
        )


def _earlier_curves(runner: Runner) -> dict[str, Curve]:
    """Return the curves of the run that wrote the resumed checkpoint, up to the checkpoint and without times."""
    from slipstream.report.files import JSON, read_run

    path, meta = runner.checkpoints.resumed_from, runner.checkpoints.resumed_meta
    name = _TIMESTAMP.search(str(meta.get("experiment_name", "")))
    if path is None or name is None or meta["iter"] != runner.iter:
        return {}
    folders = [folder / name[0] for folder in (path.parent, Path(runner.work_dir))]
    try:
        record = read_run(next(folder for folder in folders if (folder / JSON).is_file()))
    except (DataError, StopIteration):
        return {}
    curves = {}
    for key, curve in record.curves.items():
        curve.truncate(runner.iter)
        if key.startswith(("train/", "val/")) and not key.endswith("time") and curve.x:
            curves[key] = curve
    return curves


def _seconds_of_steps(phases: PhaseTimes) -> float:
    """Return the training time so far, excluding the first step, validation and checkpoints."""
    phases.switch(phases.current)
    return sum(phases.seconds.get(phase, 0.0) for phase in STEP_PHASES)


def _settings(runner: Runner) -> dict[str, Any]:
    plan, optim = runner.speed, runner.optim_wrapper
    groups = optim.param_groups if isinstance(optim, OptimWrapper) else []
    fused = [group["fused"] for group in groups if "fused" in group]
    return {
        "device": runner.device.type,
        "num_workers": getattr(runner.train_dataloader, "num_workers", 0),
        "prefetch": plan.prefetch,
        "fused": all(state is True for state in fused) if fused else None,
        "async_save": all(hook.async_save for hook in runner.hooks if isinstance(hook, CheckpointHook)),
        "compile": plan.compile is not None,
        "config": _config_name(runner.cfg.filename),
    }


def _config_name(file: Any) -> str:
    """Return the argument that names a configuration for commands: a recipe's name or the path of a file."""
    path = Path(file or "")
    return path.stem if path.parent.parts[-2:] == ("slipstream", "recipes") else str(file or "")


def _describe_step(runner: Runner) -> str:
    step = getattr(runner, "step", None)
    if isinstance(step, CompiledStep):
        if step.uses_graph and step.batches:
            return "one compiled graph"
        return "eager, because the step was not compiled as one graph; see the log"
    if isinstance(step, EagerStep):
        compiled = getattr(unwrap_model(runner.model), "_compiled_call_impl", None) is not None
        return "eager, with a compiled model" if compiled else "eager"
    return "the model's train_step" if step is not None else ""


def _memory(device: torch.device) -> dict[str, float]:
    """Return the resident memory of this process and the allocated device memory, in MiB, where available."""
    memory, status = {}, Path("/proc/self/statm")
    if status.exists():
        memory["host_mib"] = int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    if device.type != "cpu" and torch.accelerator.is_available():
        memory["device_peak_mib"] = torch.accelerator.max_memory_allocated() / 2**20
    return memory
