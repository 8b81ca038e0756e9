"""`RunRecord`, the contents of `report.json`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from slipstream.errors import DataError

# Format version of `report.json`.
FORMAT = 2
_MAX_POINTS = 1000

# `incomplete`: the run is still running, or it was killed before it could write its report.
Status = Literal["finished", "interrupted", "failed", "incomplete"]


@dataclass
class Curve:
    """A scalar over iterations. Each point summarizes the values since the previous point.

    When the curve reaches 1,000 points, adjacent points are merged, so the extremes are kept for runs of any length.
    The mean, minimum and maximum of a point are those of its finite values; None if there are none.

    Attributes:
        x: the iteration of each point's latest value.
        count: number of finite values in each point.
        bad: number of values that are NaN or infinite.
        newest: the latest value, which may be NaN or infinite.
    """

    x: list[int] = field(default_factory=list)
    mean: list[float | None] = field(default_factory=list)
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    bad: int = 0
    newest: float | None = None

    def add(self, x: int, values: Iterable[float]) -> None:
        """Append a point that summarizes `values`, which are in step order. If `values` is empty, do nothing."""
        values = [float(value) for value in values]
        if not values:
            return
        finite = [value for value in values if math.isfinite(value)]
        self._append(
            x, sum(value / len(finite) for value in finite) if finite else None, finite, finite, len(finite)
        )
        self.bad += len(values) - len(finite)
        self.newest = values[-1]
        if len(self.x) >= _MAX_POINTS:
            self._merge()

    def truncate(self, x: int) -> None:
        """Remove the points whose latest value was recorded after iteration `x`."""
        kept = sum(each <= x for each in self.x)
        if kept < len(self.x):
            for values in (self.x, self.mean, self.low, self.high, self.count):
                del values[kept:]
            self.newest = self.mean[-1] if self.mean else None

    def lowest(self) -> float | None:
        """Return the minimum of all finite values, or None if there are none."""
        return _extreme(min, self.low)

    def highest(self) -> float | None:
        """Return the maximum of all finite values, or None if there are none."""
        return _extreme(max, self.high)

    def _append(self, x: int, mean: float | None, lows: list[Any], highs: list[Any], count: int) -> None:
        self.x.append(x)
        self.mean.append(mean)
        self.low.append(_extreme(min, lows))
        self.high.append(_extreme(max, highs))
        self.count.append(count)

    def _merge(self) -> None:
        """Merge adjacent pairs of points."""
        old: list[list[Any]] = [self.x, self.mean, self.low, self.high, self.count]
        self.x, self.mean, self.low, self.high, self.count = [], [], [], [], []
        for start in range(0, len(old[0]), 2):
            x, mean, low, high, count = (values[start : start + 2] for values in old)
            total = sum(count)
            parts = [n / total * m for n, m in zip(count, mean, strict=True) if m is not None]
            self._append(x[-1], sum(parts) if parts else None, low, high, total)


def _extreme(function: Any, values: list[Any]) -> float | None:
    return function((value for value in values if value is not None), default=None)


@dataclass
class PhaseSplit:
    """The host time that a run spent in each phase, in seconds; see `slipstream.logging.PhaseTimes`.

    Attributes:
        seconds: seconds per phase, excluding the first training step.
        first: seconds per phase in the first training step.
        steps: number of training steps, including the first one.
        samples: number of samples in these steps, excluding the first step, summed over all processes; 0 if unknown.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0


@dataclass
class Confusion:
    """The confusion matrix from the last evaluation of a metric.

    Attributes:
        metric: the metric's class, such as `IoUMetric`.
        mode: `val` or `test`.
        iteration: number of training steps before the evaluation.
        matrix: one row per true class, and one column per predicted class.
    """

    metric: str
    mode: str
    iteration: int
    classes: list[str]
    matrix: list[list[int]]


@dataclass
class OptionRow:
    """A speed option; see `slipstream.speed.plan.option_rows`."""

    option: str
    value: str
    source: str
    reason: str = ""


@dataclass
class LogMessage:
    """A warning or an error from the log."""

    time: str
    level: str
    text: str


@dataclass
class RunRecord:
    """The contents of a report: what a run did, how long it took, and its results.

    Attributes:
        error: the error that ended the run.
        source: `run` if the run wrote the record, `logs` if the record was created from the log files.
        started: local time, `YYYY-MM-DD HH:MM:SS`.
        seconds: duration of the run.
        environment: versions, device and number of processes.
        settings: settings that the recommendations depend on, such as the number of workers.
        step: how the training step was executed at the end of the run, for example eagerly or as one graph.
        start_iteration: the iteration that a resumed run started from.
        curves: scalars over iterations: `train/loss`, `val/mIoU`, `speed/images_per_second`, `memory/host_mib`, ...
        config: the configuration, keyed by dotted path.
    """

    name: str
    status: Status
    error: str = ""
    source: Literal["run", "logs"] = "run"
    started: str = ""
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    step: str = ""
    iteration: int = 0
    max_iterations: int = 0
    epoch: int = 0
    max_epochs: int = 0
    start_iteration: int = 0
    resumed_from: str = ""
    phases: PhaseSplit = field(default_factory=PhaseSplit)
    curves: dict[str, Curve] = field(default_factory=dict)
    confusions: list[Confusion] = field(default_factory=list)
    options: list[OptionRow] = field(default_factory=list)
    messages: list[LogMessage] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        """Return a field, a scalar or a configuration value, or None if there is none.

        The value of a scalar (`val/mIoU`, `mIoU`) is the latest one; with the suffix `.min` or `.max`, an extreme.
        """
        if key in VALUES:
            return getattr(self, key)
        scalar, _, suffix = key.rpartition(".")
        for name, kind in ((key, "last"), (scalar, suffix)):
            for prefix in ("", "val/", "test/", "train/"):
                curve = self.curves.get(prefix + name)
                if curve is not None and kind in ("last", "min", "max"):
                    return {"last": curve.newest, "min": curve.lowest(), "max": curve.highest()}[kind]
        return self.config.get(key)

    @property
    def images_per_second(self) -> float | None:
        """Mean training speed without the first step, validation and checkpoints; None if unknown."""
        excluded = ("validation", "checkpoint", *NON_TRAINING_PHASES)
        seconds = sum(value for phase, value in self.phases.seconds.items() if phase not in excluded)
        return self.phases.samples / seconds if self.phases.samples and seconds > 0 else None

    @property
    def training_seconds(self) -> float:
        """Time for training, validation and checkpoints, excluding the first step."""
        return sum(s for phase, s in self.phases.seconds.items() if phase not in NON_TRAINING_PHASES)

    def to_json(self) -> dict[str, Any]:
        """Return nested dicts and lists of built-in values. NaN and infinity become strings."""
        data = asdict(self)
        for curve in data["curves"].values():
            newest = curve["newest"]
            curve["newest"] = newest if newest is None or math.isfinite(newest) else str(newest)
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: Any, file_name: str) -> RunRecord:
        """Return the record written by `to_json`; unknown fields are ignored.

        Raises:
            DataError: the structure is wrong, or the file has a different format version.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise DataError(
                f"{file_name} is not a report in format {FORMAT}, which this version of Slipstream reads"
            )
        try:
            values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
            for name, kind in _NESTED.items():
                nested = values.get(name, [])
                values[name] = (
                    [kind(**item) for item in nested] if isinstance(nested, list) else kind(**nested)
                )
            values["curves"] = {name: Curve(**curve) for name, curve in values.get("curves", {}).items()}
            for curve in values["curves"].values():
                curve.newest = None if curve.newest is None else float(curve.newest)
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{file_name} is damaged: {error}") from error


# Fields that `RunRecord.value` returns.
VALUES = ("name", "status", "started", "iteration", "epoch", "seconds", "step", "images_per_second")
# The phases of a run that are not part of training.
NON_TRAINING_PHASES = ("other", "test")
_NESTED: dict[str, Any] = {
    "phases": PhaseSplit, "confusions": Confusion, "options": OptionRow,
    "messages": LogMessage,
}  # fmt: skip
