"""Record a run, and write its report. `ReportHook` imports this module when a run starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slipstream.dataset.loading.loader import length
from slipstream.dist import is_main_process
from slipstream.errors import DataError
from slipstream.files import user_cache
from slipstream.hooks.checkpoint import CheckpointHook
from slipstream.hooks.report_compute import ComputeCount
from slipstream.hooks.report_examples import ExampleSelection
from slipstream.logging import STEP_PHASES, PhaseTimes
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.preemption import Preempted
from slipstream.report import Curve, PhaseSplit, RunRecord, write_report
from slipstream.report.config_values import flat_config
from slipstream.report.files import JSON, read_run
from slipstream.report.log_files import log_file, read_log
from slipstream.report.record import Compute, Confusion, Example, LoadingRate, OptionRow, Status, TunedOptions
from slipstream.scalars import is_learning_rate
from slipstream.speed.table import option_rows
from slipstream.step import CompiledStep, EagerStep
from slipstream.typecheck import matches
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["RunReport"]

T = TypeVar("T")
_TIMESTAMP = re.compile(r"\d{8}_\d{6}(_\d+)?$")
"""The end of an experiment name, which is the name of the run's log folder."""
_MAX_CLASSES = 200
"""Maximum number of classes in a confusion matrix."""
_MEMORY_INTERVAL = 1.0
"""Minimum interval between measurements of the memory use, in seconds. A measurement can take longer than the rest of
the hook's work."""


class RunReport:
    """The recorded values of a run, from which its report is written.

    Args:
        peak_tflops: see `ReportHook`.
        probe_workers: see `ReportHook`.
    """

    def __init__(self, peak_tflops: float | None, probe_workers: bool) -> None:
        self._probe_workers = probe_workers
        self._compute = ComputeCount(peak_tflops)
        self._selection: ExampleSelection | None = None
        self._examples: list[Example] = []
        self._curves: dict[str, Curve] = {}
        self._inherited: set[str] = set()  # curves of the earlier run to which no value has been added
        self._num_read: dict[str, int] = {}
        self._speed_start = 0, 0.0  # samples and seconds at the last speed point, without step 1
        self._last_memory_time = -math.inf
        self._confusions: dict[tuple[str, str], Confusion] = {}
        self._start: int | None = None
        self._status: tuple[Status, str] | None = None
        self._training = False
        self._measurements: tuple[Compute, list[LoadingRate], list[TunedOptions]] | None = None

    def before_train(self, runner: Runner) -> None:
        """Store the start iteration, and skip the values that were loaded when the run was resumed.

        The curves of a resumed run begin with those of the run that wrote the checkpoint.
        """
        self._start, self._training = runner.iter, True
        self._speed_start = runner.phases.samples, _seconds_of_steps(runner.phases)
        self._num_read = {key: history.total for key, history in runner.message_hub.log_scalars.items()}
        if is_main_process():
            if runner.checkpoints.resumed_from is not None:
                earlier = _earlier_curves(runner)
                self._curves |= earlier
                self._inherited = set(earlier)
            self._compute.begin(runner)

    def after_rollback(self, runner: Runner) -> None:
        """Remove the values recorded after the checkpoint, because the run repeats these steps and evaluations."""
        loop = runner.train_loop
        # The evaluation at the checkpoint's iteration is repeated if the checkpoint was written first.
        repeats_evaluation = not loop.validated or (runner.by_epoch and loop.inner_iter > 0)
        last_evaluated = runner.iter - 1 if repeats_evaluation else runner.iter
        for key, curve in self._curves.items():
            curve.truncate(last_evaluated if key.startswith(("val/", "test/")) else runner.iter)
        self._curves = {key: curve for key, curve in self._curves.items() if len(curve)}
        self._confusions = {
            key: confusion
            for key, confusion in self._confusions.items()
            if confusion.iteration <= last_evaluated
        }
        self._num_read = {key: history.total for key, history in runner.message_hub.log_scalars.items()}
        self._speed_start = runner.phases.samples, _seconds_of_steps(runner.phases)

    def read_logs(self, runner: Runner) -> None:
        """Add a point to each curve."""
        if self._training and is_main_process():
            self._read(runner)

    def before_val_epoch(self, runner: Runner) -> None:
        """Start selecting example predictions."""
        batches = length(runner.val_dataloader) if hasattr(runner.val_loop, "dataloader") else None
        self._selection = ExampleSelection(batches) if is_main_process() else None

    def after_val_iter(self, index: int, batch: Any, outputs: Any) -> None:
        """Select example predictions of a classifier."""
        if self._selection is not None:
            self._selection.add(index, batch, outputs)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices and the example predictions."""
        if self._selection is not None:
            self._examples = self._selection.examples(_class_names(runner.val_loop))
            self._selection = None
        self._read_metrics(runner, "val", metrics)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices."""
        self._read_metrics(runner, "test", metrics)

    def write(self, runner: Runner) -> None:
        """Write the report."""
        if not is_main_process():
            return
        self._compute.end()
        try:
            if self._training:
                self._read(runner)  # after a non-finite loss, the latest values are only in the message hub
            self._set_status(runner)
            record = self._record(runner)
            self._add_measurements(runner, record)
            write_report(record, Path(runner.log_dir))
        except Exception as error:  # a failed report must neither stop the run nor hide an error in it
            runner.logger.warning(f"The report cannot be written: {type(error).__name__}: {error}")
            runner.logger.debug("The report cannot be written", exc_info=True)
        self._training = False

    # ---- curves --------------------------------------------------------------------------------------

    def _read(self, runner: Runner) -> None:
        """Extend the curves with the values recorded since the last call. All values are on the host."""
        iteration = runner.meter.newest or self._start or 0
        for key, history in runner.message_hub.log_scalars.items():
            new = history.total - self._num_read.get(key, 0)
            if new and key.startswith("train/"):
                # Learning rates are also recorded before checkpoints and at the end of a run, so add only the latest
                # value.
                values = history.newest(1 if is_learning_rate(key) else new)
                self._curve(key).add(iteration, reversed(values))  # in step order
            self._num_read[key] = history.total
        self._read_speed(runner, iteration)

    def _read_speed(self, runner: Runner, iteration: int) -> None:
        """Add the training speed since the last call (without validation or checkpoints) and the memory use."""
        phases = runner.phases
        if phases.steps == 0:
            return
        samples, spent = phases.samples, _seconds_of_steps(phases)
        samples_before, spent_before = self._speed_start
        if samples > samples_before and spent > spent_before:
            rate = (samples - samples_before) / (spent - spent_before)
            self._curve("speed/images_per_second").add(iteration, [rate])
            self._speed_start = samples, spent
        if (now := perf_counter()) - self._last_memory_time >= _MEMORY_INTERVAL:
            self._last_memory_time = now
            for name, mebibytes in _memory(runner.device).items():
                self._curve(f"memory/{name}").add(iteration, [mebibytes])

    def _read_metrics(self, runner: Runner, mode: str, metrics: dict[str, float] | None) -> None:
        if not is_main_process():
            return
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._curve(self._curve_name(f"{mode}/{name}", runner.iter)).add(runner.iter, [value])
        loop = runner.val_loop if mode == "val" else runner.test_loop
        # A user-defined loop may have no evaluator.
        for metric in getattr(getattr(loop, "evaluator", None), "metrics", ()):
            matrix: Any = getattr(metric, "confusion", None)
            # A user-defined metric may use these attribute names for other values.
            if not matches(matrix, list[list[int]]) or len(matrix) > _MAX_CLASSES:
                continue
            if self._is_duplicate(mode, runner.iter, matrix):
                continue
            name = f"{metric.prefix} {type(metric).__name__}" if metric.prefix else type(metric).__name__
            get_names = getattr(metric, "class_names", None)
            if (mode, name) in self._confusions and self._confusions[mode, name].iteration == runner.iter:
                continue
            names = list(map(str, get_names() if callable(get_names) else ()))
            if len(names) != len(matrix):
                names = list(map(str, range(len(matrix))))
            self._confusions[mode, name] = Confusion(name, mode, runner.iter, names, matrix)

    def _curve_name(self, key: str, iteration: int) -> str:
        """Return the name of a metric's curve.

        A second evaluation at the same iteration, with different weights, gets its own curve.
        """
        curve = self._curves.get(key)
        if curve is not None and key in self._inherited:
            self._inherited.remove(key)
            curve.truncate(iteration - 1)  # a resumed run may repeat the evaluation at the checkpoint
        return f"{key} (second evaluation)" if curve and curve.x[-1] == iteration else key

    def _is_duplicate(self, mode: str, iteration: int, matrix: list[list[int]]) -> bool:
        """Return whether another metric has already returned the same matrix in this evaluation."""
        evaluation = (mode, iteration)
        return any(
            (other.mode, other.iteration) == evaluation and other.matrix == matrix
            for other in self._confusions.values()
        )

    def _curve(self, key: str) -> Curve:
        return self._curves.setdefault(key, Curve())

    # ---- the record ----------------------------------------------------------------------------------

    def _set_status(self, runner: Runner) -> None:
        if self._status is not None and not self._training:
            return  # the training status is more important than the status of a later test
        error = runner.error
        if error is None:
            self._status = "finished", ""
        else:
            kind: Status = "failed" if isinstance(error, Exception) else "interrupted"
            self._status = kind, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

    def _record(self, runner: Runner) -> RunRecord:
        path = log_file(Path(runner.log_dir))
        log = read_log(path) if path is not None else None
        status, error = self._status or ("finished", "")
        phases, trained = runner.phases, self._start is not None
        return RunRecord(
            name=runner.experiment_name,
            status=status,
            error=error,
            started=log.started if log else "",
            seconds=sum(phases.seconds.values()) + sum(phases.first.values()),
            environment={
                "slipstream": __version__,
                "seed": str(runner.seed),  # drawn at random if the configuration contains none
                **(log.environment if log else {}),
            },
            settings=_settings(runner) if trained else {"device": runner.device.type},
            step=_describe_step(runner) if trained else "",
            iteration=_completed_steps(runner),
            max_iterations=runner.max_iters if trained and runner.knows_length else 0,
            epoch=runner.epoch,
            max_epochs=runner.max_epochs if trained and runner.by_epoch else 0,
            by_epoch=runner.by_epoch,
            start_iteration=self._start or 0,
            resumed_from=runner.checkpoints.resumed_from.name if runner.checkpoints.resumed_from else "",
            samples_per_step=runner.samples_per_step if trained else 0,
            phases=PhaseSplit(
                _round_seconds(phases.seconds), _round_seconds(phases.first), phases.steps, phases.samples
            ),
            curves=self._curves,
            confusions=list(self._confusions.values()),
            examples=self._examples,
            options=[OptionRow(*row) for row in option_rows(runner.speed, runner.capabilities)],
            messages=log.messages if log else [],
            dropped_messages=log.dropped if log else 0,
            config=flat_config(runner.user_config),
        )

    def _add_measurements(self, runner: Runner, record: RunRecord) -> None:
        """Add the results that are counted or measured at the end of a training run."""
        if not self._training:
            if self._measurements is not None:
                record.compute, record.loading_rates, record.tuned = self._measurements
            return
        record.compute = self._compute.result(runner)
        if runner.error is None:
            record.tuned = _attempt(runner, _tuned)
        self._measurements = record.compute, record.loading_rates, record.tuned


def _earlier_curves(runner: Runner) -> dict[str, Curve]:
    """Return the curves of the run that wrote the resumed checkpoint, up to the checkpoint and without times."""
    path, meta = runner.checkpoints.resumed_from, runner.checkpoints.resumed_meta
    name = _TIMESTAMP.search(str(meta.get("experiment_name", "")))
    if path is None or name is None or meta["iter"] != runner.iter:
        return {}
    folders = [folder / name[0] for folder in (path.parent, Path(runner.work_dir))]
    try:
        record = read_run(next(folder for folder in folders if (folder / JSON).is_file()))
    except (DataError, OSError, StopIteration):
        return {}
    if record.source != "run":  # the steps in log files may be epochs
        return {}
    curves = {
        key: curve
        for key, curve in record.curves.items()
        if key.startswith(("train/", "val/")) and not key.endswith("time")
    }
    for curve in curves.values():
        curve.truncate(runner.iter)
    return {key: curve for key, curve in curves.items() if len(curve)}


def _completed_steps(runner: Runner) -> int:
    """Return the number of completed steps.

    After a signal, the hook that saves the state ends the run before the loop counts the last step.
    """
    error = runner.error
    saved = error.iteration if isinstance(error, Preempted) else None
    return runner.iter if saved is None else saved


def _attempt(runner: Runner, measure: Callable[[Runner], list[T]]) -> list[T]:
    """Return the result of `measure`, or an empty list if it fails. The report is still useful without the result."""
    try:
        return measure(runner)
    except Exception:
        runner.logger.debug("A measurement for the report failed", exc_info=True)
        return []


def _tuned(runner: Runner) -> list[TunedOptions]:
    folder = user_cache("tune")
    if not folder.is_dir() or next(folder.iterdir(), None) is None:
        return []  # the cache is empty, so do not import slipstream.tune
    result = runner.stored_tuning()
    if result is None or result.outcome.total is None:
        return []
    outcome, total = result.outcome, result.outcome.total
    uncertain = result.is_uncertain
    return [
        TunedOptions(outcome.adopted, total.ratio, total.low, total.high, outcome.total_is_product, uncertain)
    ]


def _class_names(loop: Any) -> list[str]:
    """Return the class names of a loop's dataset, or an empty list if they are unknown."""
    dataset = getattr(getattr(loop, "dataloader", None), "dataset", None)
    meta = getattr(dataset, "metainfo", None)
    names = (meta or {}).get("classes") if isinstance(meta, Mapping | None) else None
    names = names or getattr(dataset, "classes", None)  # torchvision datasets have this attribute
    return list(map(str, names)) if isinstance(names, list | tuple) else []


def _seconds_of_steps(phases: PhaseTimes) -> float:
    """Return the training time so far, excluding the first step, validation and checkpoints."""
    phases.switch(phases.current)
    return sum(phases.seconds.get(phase, 0.0) for phase in STEP_PHASES)


def _round_seconds(seconds: Any) -> dict[str, float]:
    return {str(phase): round(max(value, 0.0), 6) for phase, value in seconds.items()}


def _settings(runner: Runner) -> dict[str, Any]:
    plan = runner.speed
    return {
        "device": runner.device.type,
        "num_workers": getattr(runner.train_dataloader, "num_workers", 0),
        "prefetch": plan.prefetch,
        "fused": _uses_fused(runner.optim_wrapper),
        "async_save": all(hook.async_save for hook in runner.hooks if isinstance(hook, CheckpointHook)),
        "compile": plan.compile is not None,
    }


def _uses_fused(optim: OptimWrapper | OptimWrapperDict | None) -> bool | None:
    """Return whether the optimizer uses torch's fused kernels.

    Return None if the optimizer has no `fused` option, or if there is not exactly one optimizer.
    """
    if optim is None or isinstance(optim, OptimWrapperDict):
        return None
    states = [group.get("fused") for group in optim.param_groups if "fused" in group]
    return all(state is True for state in states) if states else None


def _describe_step(runner: Runner) -> str:
    step = getattr(runner, "step", None)
    if isinstance(step, CompiledStep):
        if step.uses_graph:
            return "one compiled graph" if step.batches else "eager, because compilation did not finish"
        return "eager, because the step cannot be compiled as one graph; see the log"
    if isinstance(step, EagerStep):
        compiled = getattr(unwrap_model(runner.model), "_compiled_call_impl", None) is not None
        return "eager, with a compiled model" if compiled else "eager"
    return "the model's train_step" if step is not None else ""


def _memory(device: torch.device) -> dict[str, float]:
    """Return the resident memory of this process and the allocated device memory, in MiB, where available."""
    memory = {}
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        memory["host_mib"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError, ValueError):
        pass
    if device.type != "cpu" and torch.accelerator.is_available():
        memory["device_peak_mib"] = torch.accelerator.max_memory_allocated() / 2**20
    return memory
