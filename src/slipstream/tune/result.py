"""The result of `tune`: a table, a summary, and files that other commands read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError
from slipstream.files import write_text
from slipstream.tables import make_table, table_text
from slipstream.tune.jobs import merged_speed
from slipstream.tune.search import Outcome, Row

_HEADER = ("option", "compared with", "ratio", "interval", "ms/step", "peak MiB", "compile s", "status")
_LOADER_KEYS = ("num_workers", "persistent_workers")


@dataclass(frozen=True)
class TuneResult:
    """The measured options, and the fastest combination."""

    outcome: Outcome
    base_speed: Any = None
    """The baseline's value of `speed`."""
    name: str = "the model"

    @property
    def speed(self) -> dict[str, Any]:
        """The value of `speed` for a `Runner` or `accelerate`: the baseline's options and the adopted options."""
        return merged_speed(self.base_speed, self.outcome.setting.speed)

    @property
    def num_workers(self) -> int | None:
        """The number of worker processes of the training loader; None if the current number is the fastest."""
        return self.outcome.setting.num_workers

    @property
    def rows(self) -> list[Row]:
        """One row for each value of an option, in the order of measurement."""
        return self.outcome.rows

    def summary(self) -> str:
        """Return the speedup, the epoch times, and the number of steps needed to offset the compilation time."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        outcome, total = self.outcome, self.outcome.total
        if outcome.stopped:
            yield f"The search is not complete: {outcome.stopped}."
        before = outcome.baseline_seconds
        if not outcome.adopted:
            yield f"No measured option was shown to make {self.name} faster on this machine."
        elif total is None:
            yield f"Adopted: {' + '.join(outcome.adopted)}; there was no time to measure them together."
        else:
            after, plan = before / total.ratio, " + ".join(outcome.adopted)
            yield (
                f"Fastest: {plan}, at {total.ratio:.2f} times the speed of the baseline ({total.low:.2f} to "
                f"{total.high:.2f} in {total.rounds} rounds)."
            )
            if (steps := outcome.steps_per_epoch) is not None:
                yield f"One epoch of {steps} steps: {steps * before:.3g} s before, {steps * after:.3g} s after."
            if "compile" in outcome.setting.speed and after < before:
                count = ceil(outcome.compile_seconds / (before - after))
                yield f"Compilation takes {outcome.compile_seconds:.0f} s, which {count:,} steps save."
        seconds, budget = outcome.seconds, outcome.budget
        yield f"Duration: {seconds:.0f} s of the {budget:.0f} s budget (measured on {outcome.device})."

    def __str__(self) -> str:
        baseline = f"{1e3 * self.outcome.baseline_seconds:.1f}", f"{self.outcome.baseline_mib:.0f}"
        rows = [("baseline", "", "1.00", "", *baseline, "", ""), *map(_cells, self.rows)]
        return f"{table_text(make_table(_HEADER, rows))}{self.summary()}"

    def save(self, path: str | Path) -> Path:
        """Write `path` (YAML; see `read_tuned`) and, next to it, a `.json` file with all rows.

        Raises:
            ConfigError: the folder does not exist or is not writable.
        """
        path = Path(path)
        content: dict[str, Any] = {"speed": self.speed}
        if loader := self.outcome.setting.dataloader:
            content["train_dataloader"] = loader
        # PyYAML rejects subclasses of dict, such as those in a nested configuration.
        plain = json.loads(json.dumps(content, default=str))
        comments = [f"# {line}" for line in self.summary().splitlines()]
        details = {
            "name": self.name,
            "base_speed": self.base_speed,
            **content,
            "outcome": asdict(self.outcome),
        }
        try:
            write_text(path, "\n".join([*comments, yaml.safe_dump(plain, sort_keys=False)]))
            write_text(path.with_suffix(".json"), json.dumps(details, indent=2, default=str) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error.strerror or error}") from error
        return path


def read_tuned(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return the contents of a file written by `TuneResult.save`: `speed`, and optionally `train_dataloader`.

    Raises:
        ConfigError: the file cannot be read, or contains other keys.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{path}': {str(error).splitlines()[0]}", "speed") from None
    loader = content.get("train_dataloader", {}) if isinstance(content, Mapping) else {}
    if (
        not isinstance(content, Mapping)
        or content.keys() - {"train_dataloader"} != {"speed"}
        or not all(isinstance(section, Mapping) for section in content.values())
        or loader.keys() - set(_LOADER_KEYS)
    ):
        raise ConfigError(
            f"'{path}' is not a file written by `slipstream tune`; it must contain `speed` and may contain "
            f"`train_dataloader` with {' and '.join(_LOADER_KEYS)}",
            "speed",
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
