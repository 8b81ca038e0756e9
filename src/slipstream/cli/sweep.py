"""`slipstream train --sweep` and `--multirun`: train once for each combination of values, sequentially."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from slipstream.cli.child import Child, interrupt_on_sigterm, run_child
from slipstream.cli.configure import command_args, read_config
from slipstream.cli.tables import print_table
from slipstream.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.runner import Runner

__all__ = ["check_length", "read_sweep", "sweep", "write_result"]

_OPEN, _CLOSE = "([{", ")]}"
_UNSAFE_CHARACTERS = re.compile(r"[^\w.=+-]+")
_LENGTHS = {
    "epochs", "train_cfg.max_epochs", "train_cfg.max_iters", "training_params.max_epochs",
    "training_hyperparams.max_epochs",
}  # fmt: skip
"""Keys that set the length of a run.

Their values may change when a sweep is resumed, because each run then continues from its last checkpoint.
"""
_MAX_NAME_LENGTH = 100  # maximum number of characters in a folder name


@dataclass
class Run:
    """A run in a sweep."""

    values: dict[str, str]
    """The values for this run by key, as given on the command line."""
    folder: str
    """The work_dir of the run."""
    overrides: list[str] = field(default_factory=list)
    """The overrides common to all runs in the sweep."""
    length: int | None = None
    """The number of epochs or iterations; None if unknown, or if an earlier version wrote `sweep.json`."""
    config: str = ""
    """The recipe or the name of the configuration file; empty if an earlier version wrote `sweep.json`."""
    status: int | None = None
    """Exit status; None if the run has not started."""
    error: str = ""
    seconds: float = 0.0
    """Duration of all processes that have trained this run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric, or of the loss if the run has no validation; and the best value, named `best
    METRIC`, of each metric by which the run saves its best checkpoint."""

    def has_values_of(self, other: Run) -> bool:
        """Return whether both runs have the same values. `+key` and `key` are the same key."""
        return _plain_keys(self.values) == _plain_keys(other.values)

    def has_settings_of(self, other: Run) -> bool:
        """Return whether both runs have the same overrides, in the same order, and the same length."""
        if self.length is None or other.length is None:
            return _words(self.overrides) == _words(other.overrides)
        return self.length == other.length and _other_words(self.overrides) == _other_words(other.overrides)


def sweep(args: argparse.Namespace) -> int:
    """Train once for each combination of the values in `args.sweep`, and print a table.

    With `args.multirun`, the overrides that list several values are added to `args.sweep`. If a run fails, the table
    shows its error, and the remaining runs are still started.

    Returns:
        0 if all runs succeeded, 1 if a run failed, 75 if a run was preempted, or 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: a sweep or a configuration is invalid, or the folder contains an earlier sweep and `--resume` is
            not given. In these cases, no run is started.
    """
    if args.multirun:
        args = _with_overrides(args)
    values = read_sweep(args.sweep, args.overrides)
    if args.launcher not in (None, "none"):
        raise ConfigError(
            "`--sweep` cannot be combined with `--launcher`. For several processes per run, set `--nproc`; on a "
            "cluster, submit one job per run"
        )
    runs = list(_runs(args, values))
    base = Path(runs[0].folder).parent
    others = _restore_completed(base, runs, _earlier_runs(base, args.resume is True))
    _write(base, [*runs, *others])
    status = 0
    try:
        with interrupt_on_sigterm():
            for number, run in enumerate(runs, start=1):
                is_complete = run.status == 0
                note = " (already complete; skipped)" if is_complete else ""
                print(f"Run {number} of {len(runs)}: {_format_values(run.values)}{note}", flush=True)
                if is_complete:
                    continue
                if _train(args, run) == _preempted_status():
                    status = _preempted_status()
                    break
                _write(base, [*runs, *others])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    finally:
        _write(base, [*runs, *others])
        shown = [*runs, *_comparable(others, runs[0])]
        _print(shown)
        _print_means(shown)
        if rest := sum(map(_is_incomplete, runs)):
            print(
                f"{rest} of {len(runs)} runs are not complete; to continue, use the same command with --resume"
            )
        print(f"Results: {base / 'sweep.json'}")
    return status or int(any(run.status for run in runs))


def read_sweep(words: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the values by key, given arguments such as `lr=1e-4,3e-4`.

    Commas inside brackets or quotes do not separate values.

    Raises:
        ConfigError: an argument has no key or no values, a key or a value appears twice, or the key is `work_dir`.
    """
    sweeps: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = _split(text)
        if not key or not equals or not all(values):
            raise ConfigError(f"must be key=value,value,..., such as lr=1e-4,3e-4, not '{word}'", "--sweep")
        if key.lstrip("+") == "work_dir":
            raise ConfigError(
                "'work_dir' cannot be swept, because each run already has its own folder; set one work_dir for the "
                "sweep as an override",
                "--sweep",
            )
        others = [*sweeps, *(override.partition("=")[0] for override in overrides)]
        if key.lstrip("+") in (other.lstrip("+") for other in others):
            raise ConfigError(
                f"'{key}' is set twice; set it either in one `--sweep` or as an override", "--sweep"
            )
        if len(set(values)) != len(values):
            raise ConfigError(f"'{word}' contains a value twice; list each value once", "--sweep")
        sweeps[key] = values
    return sweeps


def _with_overrides(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments whose `sweep` contains the overrides that list several values.

    Raises:
        ConfigError: no override lists several values, and `--sweep` is not given.
    """
    swept = [word for word in args.overrides if len(_split(word.partition("=")[2])) > 1]
    if not swept and not args.sweep:
        raise ConfigError("requires an override with several values, such as lr=1e-4,3e-4", "--multirun")
    overrides = [word for word in args.overrides if word not in swept]
    return argparse.Namespace(
        **{**vars(args), "overrides": overrides, "sweep": [*args.sweep, *swept], "multirun": False}
    )


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in _OPEN) - (character in _CLOSE)
    return [part.strip() for part in parts]


def _runs(args: argparse.Namespace, values: Mapping[str, Sequence[str]]) -> Iterator[Run]:
    """Yield the runs, after checking the configuration of each. All folders are in the first run's work_dir."""
    base = None
    for index, combination in enumerate(itertools.product(*values.values())):
        selected = dict(zip(values, combination, strict=True))
        overrides = [*args.overrides, *(f"{key}={value}" for key, value in selected.items())]
        cfg = read_config(argparse.Namespace(**{**vars(args), "overrides": overrides})).cfg
        label = "_".join(f"{key}={value}" for key, value in selected.items())
        name = _UNSAFE_CHARACTERS.sub("-", f"{index}_{label}")[:_MAX_NAME_LENGTH]
        base = base or Path(cfg.work_dir) / "sweep"
        yield Run(selected, str(base / name), list(args.overrides), _length(cfg), Path(args.config).name)


def _length(cfg: Config) -> int | None:
    train_cfg = cfg.get("train_cfg") or {}
    length = train_cfg.get("max_epochs", train_cfg.get("max_iters"))
    return length if isinstance(length, int) else None


def _earlier_runs(base: Path, resume: bool) -> list[Run]:
    """Return the runs in `sweep.json`, or an empty list if the file does not exist or cannot be read.

    Raises:
        ConfigError: the file exists, but `--resume` is not given.
    """
    file = base / "sweep.json"
    if not resume and file.exists():
        raise ConfigError(
            f"{base} contains an earlier sweep; to continue it or to add values, use `--resume`; for a new sweep, set "
            "a different `--work-dir` or delete the folder",
            "--sweep",
        )
    try:
        rows = list(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []  # each run continues from its last checkpoint
    runs = []
    for row in rows:
        with suppress(TypeError, ValueError, AttributeError):
            run = Run(**row)
            run.metrics = {name: float(value) for name, value in run.metrics.items()}
            run.folder = str(base / Path(run.folder).name)  # the sweep may have been moved
            runs.append(run)
    return runs


def _comparable(others: Sequence[Run], run: Run) -> list[Run]:
    """Return the runs with the same swept keys, overrides and length as `run`, with their values in the same order."""
    return [
        replace(other, values={key: values[key.lstrip("+")] for key in run.values})
        for other in others
        if (values := _plain_keys(other.values)).keys() == _plain_keys(run.values).keys()
        and other.has_settings_of(run)
    ]


def _plain_keys(values: Mapping[str, str]) -> dict[str, str]:
    return {key.lstrip("+"): value for key, value in values.items()}


def _words(overrides: Sequence[str]) -> list[str]:
    return [word.lstrip("+") for word in overrides]


def _other_words(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, without `+` and without those that set the length of the runs."""
    return [word for word in _words(overrides) if word.partition("=")[0] not in _LENGTHS]


def _restore_completed(base: Path, runs: Sequence[Run], earlier: Sequence[Run]) -> list[Run]:
    """Restore the results of runs that an earlier invocation completed, and return its other runs.

    The other runs have different values or a different length.

    Raises:
        ConfigError: the earlier invocation used another configuration or different overrides, so its results do not
            apply to these settings.
    """
    for before in earlier:
        if before.config not in ("", runs[0].config):
            raise ConfigError(
                f"the sweep in {base} trained {before.config}, not {runs[0].config}; use the same configuration, or a "
                "different work_dir",
                "--resume",
            )
        if _plain_keys(before.values).keys() != _plain_keys(runs[0].values).keys():
            continue
        if keys := _changed_keys(before.overrides, runs[0].overrides):
            raise ConfigError(
                f"the sweep in {base} was previously run with different values for {', '.join(keys)} (or with another "
                "order of these overrides), so its results do not apply to these settings; use the same overrides in "
                "the same order, or a different work_dir",
                "--resume",
            )
    others, new = list(earlier), []
    for run in runs:
        matches = [before for before in earlier if before.has_values_of(run)]
        if not matches:
            new.append(run)
            continue
        run.folder = matches[0].folder  # its number can differ if values were added to the sweep
        run.seconds = max(before.seconds for before in matches)  # the run continues from its last checkpoint
        for before in matches:
            if not before.has_settings_of(run):
                continue  # keep the results for another length
            others.remove(before)
            if before.status == 0:
                run.status, run.seconds, run.metrics = 0, before.seconds, before.metrics
    _separate_folders(new, {before.folder for before in earlier})
    return others


def _separate_folders(runs: Sequence[Run], taken: set[str]) -> None:
    """Give each run its own folder, because another run can have the same shortened name."""
    for run in runs:
        folder, number = run.folder, 2
        while run.folder in taken:
            run.folder, number = f"{folder}_{number}", number + 1
        taken.add(run.folder)


def _changed_keys(before: list[str], now: list[str]) -> list[str]:
    """Return the keys of the overrides that differ or are in another order, except those that set the length."""
    first, last = _other_words(before), _other_words(now)
    changed = set(first) ^ set(last) or set(last if first != last else ())
    return sorted({word.partition("=")[0] for word in changed})


def _train(args: argparse.Namespace, run: Run) -> int:
    """Train in a separate process, and store the result in `run`. Return the exit status."""
    words = [f"{key}={value}" for key, value in run.values.items()]
    options = {**vars(args), "overrides": [*args.overrides, *words], "work_dir": run.folder}
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        result = Path(folder) / "result.json"
        argv = ["-m", "slipstream", *command_args(argparse.Namespace(**options), result=str(result))]
        if args.nproc is not None:
            argv.append(f"--nproc={args.nproc}")
        if args.max_restarts:
            argv.append(f"--max-restarts={args.max_restarts}")
        run.status, run.error = 130, "interrupted"  # these values remain if the run is interrupted
        start = perf_counter()
        try:
            child: Child = run_child(argv)
            run.status, run.error, run.seconds = child.status, child.reason, run.seconds + child.seconds
        except KeyboardInterrupt:
            run.seconds += perf_counter() - start
            raise
        finally:
            if result.is_file():
                run.metrics = json.loads(result.read_text(encoding="utf-8"))
                if run.status == 130:  # the run completed before it was interrupted
                    run.status, run.error = 0, ""
    return child.status


def _preempted_status() -> int:
    from slipstream.preemption import EXIT_STATUS

    return EXIT_STATUS


def check_length(cfg: Config) -> None:
    """Check that the checkpoint from which a run of a sweep resumes does not come from a longer run.

    Raises:
        ConfigError: the checkpoint comes from a longer run, whose results do not apply to this length.
    """
    from slipstream.checkpoint import newest_checkpoints, read_meta

    train_cfg = cfg.get("train_cfg") or {}
    for path in newest_checkpoints(cfg.work_dir):
        try:
            meta = read_meta(path)
        except CheckpointError:
            continue  # the Runner does not resume from a damaged checkpoint either
        for key, name in (("epoch", "max_epochs"), ("iter", "max_iters")):
            done, length = meta.get(key), train_cfg.get(name)
            if isinstance(length, int) and isinstance(done, int) and done > length:
                raise ConfigError(
                    f"{path} was saved at {key} {done}, so its results do not apply to {name}={length}; increase "
                    f"{name}, or use a different work_dir",
                    "--resume",
                )
        return


def write_result(path: str, runner: Runner) -> None:
    """Write a run's last metrics for the sweep that started the run."""
    from slipstream.files import write_text

    scalars = {name: history.current() for name, history in runner.message_hub.log_scalars.items()}
    metrics = {
        name.removeprefix("val/"): value
        for name, value in scalars.items()
        if name.startswith("val/") and name not in ("val/time", "val/data_time")
    }
    if not metrics and "train/loss" in scalars:
        metrics["loss"] = scalars["train/loss"]
    for name, value in runner.message_hub.runtime_info.items():
        if name.startswith("best_score/"):
            metrics[f"best {name.removeprefix('best_score/').removeprefix('val/')}"] = value
    if speed := runner.message_hub.get_info("images_per_second"):
        metrics["images/s"] = speed
    write_text(Path(path), json.dumps(metrics))


def _write(base: Path, runs: Sequence[Run]) -> None:
    """Write `sweep.json`. NaN and infinity are converted to strings, because JSON cannot represent them."""
    from slipstream.files import write_text

    base.mkdir(parents=True, exist_ok=True)
    rows = [asdict(run) for run in runs]
    for row in rows:
        row["metrics"] = {
            name: value if math.isfinite(value) else str(value) for name, value in row["metrics"].items()
        }
    write_text(base / "sweep.json", json.dumps(rows, indent=1, allow_nan=False) + "\n")


def _print(runs: Sequence[Run]) -> None:
    names = _metric_names(runs)
    rows = []
    for run in runs:
        metrics = [f"{run.metrics[name]:.4g}" if name in run.metrics else "" for name in names]
        text = f"{run.seconds:.0f} s" if run.status == 0 else f"failed: {run.error}"
        if _is_incomplete(run):
            text = "not started" if run.status is None else "interrupted"
        rows.append([*run.values.values(), *metrics, text])
    print_table([*_column_names(list(runs[0].values)), *names, "time"], rows, None)


def _is_incomplete(run: Run) -> bool:
    """Return whether the run has not started, was interrupted, or was preempted."""
    return run.status in (None, 130, _preempted_status())


def _print_means(runs: Sequence[Run]) -> None:
    """If the seed is swept, print the mean and the standard deviation of each metric over the seeds."""
    seeds = {key for key in runs[0].values if key.lstrip("+").rpartition(".")[2] == "seed"}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        others = tuple(value for key, value in run.values.items() if key not in seeds)
        groups.setdefault(others, []).append(run)
    if not seeds or all(sum(run.status == 0 for run in group) < 2 for group in groups.values()):
        return
    names = _metric_names(runs)
    rows = []
    for others, group in groups.items():
        finished = [run for run in group if run.status == 0]
        means = [_mean([run.metrics[name] for run in finished if name in run.metrics]) for name in names]
        count = str(len(group)) if len(finished) == len(group) else f"{len(finished)} of {len(group)}"
        rows.append([*others, *means, count])
    print("Mean and sample standard deviation over the seeds:")
    print_table(
        [*_column_names([key for key in runs[0].values if key not in seeds]), *names, "runs"], rows, None
    )


def _mean(values: Sequence[float]) -> str:
    if not values or not all(map(math.isfinite, values)):
        return "nan" if values else ""
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{deviation}"


def _metric_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def _column_names(keys: Sequence[str]) -> Sequence[str]:
    """Return the last parts of the keys, or the full keys if the last parts of two keys are equal."""
    short = [key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(keys) else keys


def _format_values(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
