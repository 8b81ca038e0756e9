"""`RunRecord`, the contents of `report.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from slipstream.errors import DataError
from slipstream.report.curve import Curve
from slipstream.typecheck import NonNegative, NonNegativeInt, Probability, describe_with_article, matches

__all__ = [
    "FORMAT",
    "PNG_SIGNATURE",
    "Compute",
    "Confusion",
    "Example",
    "LoadingRate",
    "LogMessage",
    "OptionRow",
    "PhaseSplit",
    "RunRecord",
    "Status",
    "TunedOptions",
]

FORMAT = 1
"""Format version of `report.json`."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a PNG file."""

Status = Literal["finished", "interrupted", "failed", "incomplete"]
"""`incomplete`: the run is still running, or it was killed before it could write its report."""


@dataclass
class PhaseSplit:
    """The host time that a run spent in each phase, in seconds; see `slipstream.logging.PhaseTimes`."""

    seconds: dict[str, NonNegative] = field(default_factory=dict)
    """Seconds per phase, excluding the first training step."""
    first: dict[str, NonNegative] = field(default_factory=dict)
    """Seconds per phase in the first training step."""
    steps: NonNegativeInt = 0
    """Number of training steps, including the first one."""
    samples: NonNegativeInt = 0
    """Number of samples in these steps, excluding the first step, summed over all processes; 0 if unknown."""


@dataclass
class Compute:
    """The operations per sample and the device's peak throughput, which determine the model FLOPs utilization."""

    flops_per_sample: NonNegative = 0.0
    """Number of floating-point operations in matrix products and convolutions in the forward and backward passes for
    one sample; 0 if unknown."""
    peak_flops: NonNegative = 0.0
    """Peak throughput of one device at `precision`, in operations per second; 0 if unknown."""
    devices: NonNegativeInt = 1
    precision: str = ""
    """`fp32`, `tf32`, `bf16`, `fp16` or `fp8`."""
    source: str = ""
    """Source of `peak_flops`."""
    problem: str = ""
    """Why the utilization is unknown."""


@dataclass
class Confusion:
    """The confusion matrix from the last evaluation of a metric."""

    metric: str
    """The metric's class, such as `IoUMetric`."""
    mode: str
    """`val` or `test`."""
    iteration: NonNegativeInt
    """Number of training steps before the evaluation."""
    classes: list[str]
    matrix: list[list[NonNegativeInt]]
    """Number of pixels or samples; rows are targets, columns are predictions."""


@dataclass
class Example:
    """The prediction for one sample in the last validation run."""

    label: str
    """The name of the target's class."""
    prediction: str
    """The name of the predicted class."""
    probability: Probability | None
    """Probability of the predicted class; None if the model returns class ids instead of scores."""
    picture: str
    """The image as a base64-encoded PNG file."""


@dataclass
class LoadingRate:
    """The rate at which one process loads training data, measured without training."""

    num_workers: NonNegativeInt
    samples_per_second: NonNegative


@dataclass
class TunedOptions:
    """The stored result of `slipstream tune` for the configuration of the run, on the same machine."""

    adopted: list[str]
    ratio: NonNegative
    """Step time of the configuration divided by the step time with these options."""
    low: NonNegative
    high: NonNegative
    """Bounds of the confidence interval of `ratio`; see also `is_product`."""
    is_product: bool
    """Whether `ratio` and its bounds are products of the results for individual options."""
    is_uncertain: bool = False
    """See `TuneResult.is_uncertain`."""


@dataclass
class LogMessage:
    """A warning, an error or the torch.compile summary from the log file."""

    time: str
    level: str
    text: str


@dataclass
class OptionRow:
    """A speed option that is set, or that `auto` leaves disabled."""

    option: str
    value: str
    source: str
    """The configuration key that sets the option, or `auto`."""
    reason: str


@dataclass
class RunRecord:
    """The data that a run recorded. `report.json` contains these fields; later versions may add fields."""

    name: str
    """The experiment name."""
    status: Status = "incomplete"
    error: str = ""
    """The type and message of the error that ended the run."""
    source: Literal["run", "logs"] = "run"
    """`run` if the run wrote the record, `logs` if `slipstream report` created the record from the log files."""
    started: str = ""
    """Local time, `YYYY-MM-DD HH:MM:SS`."""
    seconds: NonNegative = 0.0
    """Duration of the run."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions, device and number of processes."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the recommendations depend on, such as the number of workers."""
    step: str = ""
    """How the training step was executed at the end of the run, for example eagerly or as one graph."""
    iteration: NonNegativeInt = 0
    max_iterations: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    max_epochs: NonNegativeInt = 0
    by_epoch: bool = True
    start_iteration: NonNegativeInt = 0
    """The iteration that a resumed run started from."""
    resumed_from: str = ""
    samples_per_step: NonNegativeInt = 0
    """Number of samples in a full batch, summed over all processes; 0 if unknown."""
    phases: PhaseSplit = field(default_factory=PhaseSplit)
    curves: dict[str, Curve] = field(default_factory=dict)
    """Scalars over iterations: `train/loss`, `val/mIoU`, `speed/images_per_second`, `memory/host_mib`, ..."""
    confusions: list[Confusion] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    """Predictions from a classifier's last validation run, errors first."""
    compute: Compute = field(default_factory=Compute)
    loading_rates: list[LoadingRate] = field(default_factory=list)
    """Loading rates measured at the end of the run, if `ReportHook.probe_workers` is set."""
    tuned: list[TunedOptions] = field(default_factory=list)
    """The stored result of `slipstream tune`; empty if there is none."""
    options: list[OptionRow] = field(default_factory=list)
    messages: list[LogMessage] = field(default_factory=list)
    dropped_messages: NonNegativeInt = 0
    """Number of messages omitted from `messages` because there were too many."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration, as built-in values keyed by dotted path."""

    def to_json(self) -> dict[str, Any]:
        """Return nested dicts and lists of built-in values."""
        data: dict[str, Any] = {"format": FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "curves":
                data[each.name] = {name: curve.to_json() for name, curve in value.items()}
            elif each.name in _NESTED:
                data[each.name] = (
                    [asdict(item) for item in value] if isinstance(value, list) else asdict(value)
                )
            else:
                data[each.name] = value
        return data

    @classmethod
    def from_json(cls, data: Any, file_name: str) -> RunRecord:
        """Return the record written by `to_json`; unknown fields are ignored.

        Args:
            data: the parsed JSON.
            file_name: name of the file, used in error messages.

        Raises:
            DataError: a field is missing or has the wrong type, or the file has a different format version.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("format"), int):
            raise DataError(f"{file_name} is not a report, because it has no 'format'")
        if data["format"] != FORMAT:
            raise DataError(
                f"{file_name} has format {data['format']}, but this version of Slipstream reads format {FORMAT}; "
                "use the version that wrote it"
            )
        curves = data.get("curves", {})
        if not isinstance(curves, Mapping):
            raise DataError(f"'curves' in {file_name} must be an object")
        values = {name: data[name] for name in _HINTS if name in data and name != "curves"}
        values["curves"] = {
            str(name): Curve.from_json(curve, f"curves.{name} in {file_name}")
            for name, curve in curves.items()
        }
        for name, kind in _NESTED.items():
            if name in values:
                values[name] = _nested(values[name], kind, name, file_name)
        record: RunRecord = _build(cls, values, "", file_name)
        return record


_NESTED: dict[str, Any] = {
    "phases": PhaseSplit,
    "compute": Compute,
    "confusions": Confusion,
    "examples": Example,
    "loading_rates": LoadingRate,
    "tuned": TunedOptions,
    "options": OptionRow,
    "messages": LogMessage,
}
_HINTS = get_type_hints(RunRecord, include_extras=True)


def _nested(value: Any, kind: Any, name: str, file_name: str) -> Any:
    if kind in (PhaseSplit, Compute):
        return _object(value, kind, name, file_name)
    if not isinstance(value, list):
        raise DataError(f"'{name}' in {file_name} must be a list")
    return [_object(item, kind, f"{name}[{index}]", file_name) for index, item in enumerate(value)]


def _object(value: Any, kind: Any, path: str, file_name: str) -> Any:
    if not isinstance(value, Mapping):
        raise DataError(f"'{path}' in {file_name} must be an object")
    known = {each.name for each in fields(kind)}
    item = _build(kind, {key: entry for key, entry in value.items() if key in known}, f"{path}.", file_name)
    if isinstance(item, Confusion) and {len(item.matrix), *map(len, item.matrix)} != {len(item.classes)}:
        raise DataError(f"'{path}.matrix' in {file_name} must have one row and one column per class")
    return item


def _build(kind: Any, values: dict[str, Any], prefix: str, file_name: str) -> Any:
    hints = _HINTS if kind is RunRecord else get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        if name not in (*_NESTED, "curves") and not matches(value, hints[name]):
            raise DataError(f"'{prefix}{name}' in {file_name} must be {describe_with_article(hints[name])}")
    try:
        return kind(**values)
    except TypeError as error:
        raise DataError(f"{file_name} is incomplete: {error}") from error
