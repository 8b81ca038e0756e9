"""The result of `tune`: a table, a summary, and files that other commands read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slipstream.errors import ConfigError, did_you_mean
from slipstream.files import write_text
from slipstream.tables import make_table, table_text
from slipstream.tune.jobs import Setting, merged_speed
from slipstream.tune.process import incomplete_note
from slipstream.tune.search import MIN_GAIN, Outcome, Row
from slipstream.tune.statistics import Estimate

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TuneResult", "read_tuned"]

_LOADER_KEYS = ("num_workers", "persistent_workers", "batch_size")


_UNDECIDED = ("inconclusive", "timed out", "not measured")
"""Statuses of options that may be faster."""


@dataclass(frozen=True)
class TuneResult:
    """The measured options, and the fastest combination."""

    outcome: Outcome
    base_speed: Any = None
    """The baseline's value of `speed`."""
    name: str = "the model"
    cached: bool = False
    """Whether the result was read from the cache."""

    @property
    def speed(self) -> dict[str, Any]:
        """The value of `speed` for a `Runner` or `accelerate`: the baseline's options and the adopted options."""
        return merged_speed(self.base_speed, self.outcome.setting.speed)

    @property
    def num_workers(self) -> int | None:
        """The number of worker processes of the training loader; None if the current number is the fastest."""
        return self.outcome.setting.num_workers

    @property
    def batch_size(self) -> int | None:
        """The batch size that, with the plan's `accumulate`, preserves the effective batch size; None if unchanged."""
        return self.outcome.setting.batch_size

    @property
    def is_uncertain(self) -> bool:
        """Whether the lower bound of an adopted option, or of the whole combination, is below `MIN_GAIN`."""
        adopted = [row.estimate for row in self.rows if row.status == "adopted"]
        return any(
            estimate.low < MIN_GAIN for estimate in (*adopted, self.outcome.total) if estimate is not None
        )

    @property
    def rows(self) -> list[Row]:
        """One row for each value of an option, in the order of measurement."""
        return self.outcome.rows

    def table(self) -> Table:
        """Return a table with the ratio, the interval, the memory usage and the status for each value of an option."""
        header = (
            "option",
            "compared with",
            "ratio",
            "interval",
            "ms/step",
            "peak MiB",
            "compile s",
            "status",
        )
        baseline = f"{1e3 * self.outcome.baseline_seconds:.1f}", f"{self.outcome.baseline_mib:.0f}"
        return make_table(header, [("baseline", "", "1.00", "", *baseline, "", ""), *map(_cells, self.rows)])

    def summary(self) -> str:
        """Return the speedup, the epoch times, and the number of steps needed to offset the compilation time."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        outcome, total = self.outcome, self.outcome.total
        if outcome.stopped:
            yield incomplete_note("search", outcome.stopped)
        before = outcome.baseline_seconds
        if not any(row.estimate for row in outcome.rows):
            yield f"No option was measured for {self.name}; keep the current options."
        elif total is None:
            yield f"No measured option was shown to make {self.name} faster on this machine; keep the current options."
            counts = {name: sum(row.status == name for row in outcome.rows) for name in _UNDECIDED}
            if undecided := ", ".join(f"{count} {name}" for name, count in counts.items() if count):
                yield (
                    f"Undecided: {undecided}. Increase the budget. If other programs were running, stop them, and "
                    "measure again with --no-cache (cache=False in Python)."
                )
        else:
            after = before / total.ratio
            interval = (  # the product of the individual intervals is not a confidence interval for the product
                "product of the individual ratios"
                if outcome.total_is_product
                else f"{total.low:.2f} to {total.high:.2f} in {total.rounds} rounds, measured against the baseline"
            )
            fastest = "Probably fastest" if self.is_uncertain else "Fastest"
            yield (
                f"{fastest}: {' + '.join(outcome.adopted)}, at {total.ratio:.2f} times the speed of the baseline "
                f"({interval})."
            )
            if (steps := outcome.steps_per_epoch) is not None:
                interval = (
                    ""
                    if outcome.total_is_product
                    else f"{steps * before / total.high:.3g} to {steps * before / total.low:.3g} s; "
                )
                yield (
                    f"One epoch of {steps} step{'s' * (steps != 1)}: {steps * before:.3g} s before, "
                    f"{steps * after:.3g} s after ({interval}without validation and the start of worker processes)."
                )
            if "compile" in outcome.setting.speed and after < before:
                num_steps = ceil(outcome.compile_seconds / (before - after))
                yield (
                    f"Compilation takes {outcome.compile_seconds:.0f} s. The faster plan saves this much time within "
                    f"{num_steps:,} step{'s' * (num_steps != 1)}."
                )
        for row in outcome.rows:
            if row.status == "faster" and row.estimate is not None:
                yield f"{row.label} is {row.estimate.ratio:.2f} times as fast as {row.reference}; {row.reason}"
        if self.cached:
            yield (
                f"Read from the cache (measured on {outcome.device} in {outcome.seconds:.0f} s). To measure again, use "
                "--no-cache, or cache=False in Python."
            )
        else:
            yield (
                f"Duration: {outcome.seconds:.0f} s of the {outcome.budget:.0f} s budget (measured on "
                f"{outcome.device})."
            )

    def __str__(self) -> str:
        return f"{table_text(self.table())}{self.summary()}"

    def yaml_text(self) -> str:
        """Return the contents of `tuned.yaml`: the `speed` and `train_dataloader` keys of a configuration."""
        content: dict[str, Any] = {"speed": self.speed}
        if loader := self.outcome.setting.dataloader:
            content["train_dataloader"] = loader
        lines = [f"# {line}" for line in self.summary().splitlines()]
        # PyYAML rejects subclasses of dict, such as those in a nested configuration.
        plain = json.loads(json.dumps(content, default=str))
        return "\n".join([*lines, yaml.safe_dump(plain, sort_keys=False)])

    def save(self, path: str | Path) -> Path:
        """Write `path` (YAML; see `read_tuned`) and, next to it, a `.json` file with all rows.

        Each file is written atomically.

        Raises:
            ConfigError: the folder does not exist or is not writable.
        """
        path = Path(path)
        details = json.dumps(self.to_dict(), indent=2, default=str) + "\n"
        for file, text in ((path, self.yaml_text()), (path.with_suffix(".json"), details)):
            try:
                write_text(file, text)
            except OSError as error:
                raise ConfigError(f"cannot write '{file}': {error.strerror or error}") from error
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return all values as built-in Python types; times are in seconds and memory in MiB."""
        return {
            "name": self.name,
            "base_speed": self.base_speed,
            "speed": self.speed,
            "outcome": asdict(self.outcome),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TuneResult:
        """Build the result from the return value of `to_dict`.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        fields = dict(values["outcome"])
        rows = [
            Row(
                **{
                    **row,
                    "estimate": _estimate(row["estimate"]),
                    "loss_difference": _pair(row["loss_difference"]),
                    "setting": Setting(**row["setting"]),
                }
            )
            for row in fields.pop("rows")
        ]
        total, setting = _estimate(fields.pop("total")), Setting(**fields.pop("setting"))
        outcome = Outcome(rows=rows, total=total, setting=setting, **fields)
        return cls(outcome, values["base_speed"], values["name"], cached=True)


def read_tuned(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return the contents of a file written by `TuneResult.save`: `speed`, and optionally `train_dataloader`.

    Raises:
        ConfigError: the file cannot be read, or contains other keys.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror or error}", "speed") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not a YAML file: {str(error).splitlines()[0]}", "speed") from None
    known = {"speed": None, "train_dataloader": _LOADER_KEYS}
    if not isinstance(content, Mapping) or "speed" not in content:
        raise ConfigError(f"'{path}' has no 'speed' key; pass a file written by `slipstream tune`", "speed")
    for key, section in content.items():
        if key not in known:
            raise ConfigError(f"'{path}': unknown key '{key}'{did_you_mean(str(key), known)}", "speed")
        if not isinstance(section, Mapping):
            raise ConfigError(f"'{path}': '{key}' must be a dict, not {type(section).__name__}", "speed")
        for name in section if known[key] else ():
            if name not in _LOADER_KEYS:
                raise ConfigError(
                    f"'{path}': unknown key '{key}.{name}'{did_you_mean(str(name), _LOADER_KEYS)}", "speed"
                )
    return {key: dict(section) for key, section in content.items()}


def _cells(row: Row) -> tuple[str, ...]:
    estimate = row.estimate
    return (
        row.label,
        row.against if estimate else "",
        f"{estimate.ratio:.2f}" if estimate else "",
        f"{estimate.low:.2f}-{estimate.high:.2f}" if estimate else "",
        "" if row.step_seconds is None else f"{1e3 * row.step_seconds:.1f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        "" if row.compile_seconds is None else f"{row.compile_seconds:.1f}",
        f"{row.status}: {row.reason}" if row.reason else row.status,
    )


def _estimate(values: Mapping[str, Any] | None) -> Estimate | None:
    return None if values is None else Estimate(**values)


def _pair(values: Any) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])
