"""`slipstream bench`: measure the training speed of recipes, and compare it with other frameworks."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from slipstream.cli.configure import load_config
from slipstream.cli.peers import CONTENDERS, FRAMEWORKS, PeerJob, read_subject
from slipstream.cli.profile import prepare_output_folder
from slipstream.cli.tables import print_table
from slipstream.config import Config
from slipstream.cores import cores, cpu_name
from slipstream.dist import infer_launcher, is_main_process
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import is_installed
from slipstream.files import write_text
from slipstream.runner.environment import EnvOptions, collect_env, setup_env
from slipstream.tune.api import config_job
from slipstream.tune.jobs import Setting, merged_speed
from slipstream.tune.observer import Timer
from slipstream.tune.options import EXACT, LOW_PRECISION
from slipstream.tune.process import Job, Process, TrialError
from slipstream.tune.statistics import Estimate, difference, estimate

_RECIPES = [
    f"street_scenes_{name}"
    for name in ("pp_lite_t", "stdc1_seg", "regseg48", "segformer_b0", "ddrnet_23_slim")
]
_HEADER = ("recipe", "run", "ms per step (interval)", "speed (interval)", "samples/s", "peak MiB", "losses")
# The speed options that a run overrides.
_OVERRIDDEN = ("precision", "compile", "cuda_graph")
# SuperGradients' keys for these options.
_PARAMS = ("mixed_precision", "torch_compile", "torch_compile_options", "speed")
_MIN_WARMUP = 3  # the second step captures and verifies the graph of a compiled step
_NUM_ROUNDS = 5


@dataclass
class _Run:
    """One row of the result: a training run and its measurements."""

    recipe: str
    label: str
    job: Job
    tolerance: Any = EXACT
    # The process that executes the run; None after a failure.
    process: Process | None = None
    warm: Mapping[str, Any] = field(default_factory=dict)
    # Mean step time of each round.
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    status: str = ""

    def fail(self, error: TrialError) -> None:
        """Store the error and end the process."""
        self.status = f"{error.status}: {error.reason}"
        if self.process is not None:
            self.process.end()
        self.process = None


def run(args: argparse.Namespace) -> int:
    """Measure the recipes one after the other, and update the report after each recipe.

    Returns:
        0 if all runs succeeded, 1 if a run failed or its losses differ, 130 after Ctrl-C.

    Raises:
        ConfigError: an option is invalid, a recipe does not exist, or the output folder is not writable.
    """
    if args.warmup < _MIN_WARMUP:
        raise ConfigError(f"must be at least {_MIN_WARMUP}: the second step compiles", "--warmup")
    if args.against and args.precision is not None:
        raise ConfigError(
            "does not apply to --against; set training_params.mixed_precision instead", "--precision"
        )
    for name in args.against or ():
        if name not in CONTENDERS:
            known = f"{did_you_mean(name, CONTENDERS)} (choose from {', '.join(CONTENDERS)})"
            raise UnknownNameError(f"'{name}' is not a framework{known}", "--against")
    overrides = [word for word in args.recipes if "=" in word]
    names = [word for word in args.recipes if "=" not in word] or (_RECIPES[:1] if args.against else _RECIPES)
    configs = {name: load_config(name, overrides, args.config_dir, bool(args.trust)).cfg for name in names}
    if (launcher := infer_launcher()) != "none":
        setup_env(launcher, EnvOptions())
    out, finished = prepare_output_folder(Path(args.out)), list[_Run]()
    environment = _environment()
    try:
        for name, cfg in configs.items():
            runs = (_contenders if args.against else _variants)(name, cfg, args)
            finished += runs
            _measure(runs, args)
            _write(out, environment, finished)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        file = _write(out, environment, finished)
        if is_main_process():
            print_table(_HEADER, [_cells(run, _first(run, finished)) for run in finished], 140)
            print(f"Results: {file}")
    return int(any(run.status for run in finished))


def _variants(name: str, cfg: Config, args: argparse.Namespace) -> list[_Run]:
    """Return the runs of a recipe with each combination of compilation and precision."""
    modes = [False, True] if args.mode is None else [args.mode == "compiled"]
    precisions = [False, True] if args.precision is None else [args.precision == "amp"]
    runs = []
    for compiled, amp in itertools.product(modes, precisions):
        speed: dict[str, Any] = {"precision": "bf16" if amp else "fp32"}
        if compiled:
            speed["compile"] = {"scope": "step"}
        job = config_job(_configured(cfg, speed))(Setting(single_batch=args.synthetic))
        label = f"{'compiled' if compiled else 'eager'}, {'AMP' if amp else 'float32'}"
        runs.append(_Run(name, label, job, LOW_PRECISION if amp else EXACT))
    return runs


def _configured(cfg: Config, speed: Mapping[str, Any]) -> Config:
    """Return the recipe's configuration with a run's options."""
    cfg = Config(dict(cfg))
    own = {k: v for k, v in merged_speed(cfg.get("speed"), {}).items() if k not in _OVERRIDDEN}
    params = {k: v for k, v in (cfg.get("training_params") or {}).items() if k not in _PARAMS}
    cfg.update(speed={**own, **speed}, training_params=params or None, load_from=None, log_level="WARNING")
    return cfg


def _contenders(name: str, cfg: Config, args: argparse.Namespace) -> list[_Run]:
    """Return the runs with each framework; the first one is the hand-written loop."""
    skipped = {"eager": "slipstream_compiled", "compiled": "slipstream"}.get(args.mode)
    names = {"loop", "slipstream", "slipstream_compiled", *args.against} - {skipped}
    subject = read_subject(_configured(cfg, {}))
    missing = [key for key in FRAMEWORKS if not is_installed(key)]
    return [
        _Run(name, key, PeerJob(key, subject), status="not installed" if key in missing else "")
        for key in CONTENDERS
        if key in names
    ]


def _measure(runs: Sequence[_Run], args: argparse.Namespace) -> None:
    """Start each run in its own process, then time the runs in turn."""
    steps = max(1, args.steps // _NUM_ROUNDS)
    with ExitStack() as stack:
        for each in runs:
            if each.status:
                continue
            compiles = "; compiling can take minutes" * ("compiled" in each.label)
            _report(f"{each.recipe}: {each.label}: starting{compiles}")
            begin = time.monotonic()
            each.process = stack.enter_context(Process(each.job, partial(Timer, warmup=args.warmup)))
            try:
                each.warm = each.process.wait_for("warm", args.timeout)
                if problem := each.warm["problem"]:
                    raise TrialError("failed", problem)
            except TrialError as error:
                each.fail(error)
            ready = f"ready after {time.monotonic() - begin:.0f} s"
            if each.process is not None and (warmup := each.process.warmup_seconds):
                ready += f", the fastest step so far: {1e3 * min(warmup):.4g} ms"
            _report(f"{each.recipe}: {each.label}: {each.status or ready}")
        for index in range(_NUM_ROUNDS):
            _report(f"{runs[0].recipe}: round {index + 1} of {_NUM_ROUNDS}")
            for each in [*runs[index % len(runs) :], *runs[: index % len(runs)]]:
                if each.process is None:
                    continue
                try:
                    timed = each.process.time(steps, 1 + each.warm["buffered"], args.timeout)
                except TrialError as error:
                    each.fail(error)
                    continue
                each.seconds.append(timed["seconds"])
                each.peak_mib = float(timed["peak_mib"])
    for each in runs:
        if not each.status and runs[0].warm:
            first, mean = difference(each.warm["losses"], runs[0].warm["losses"])
            if not (first <= each.tolerance.first and mean <= each.tolerance.mean):
                each.status = f"different losses: by {first:.2g} in the first step, {mean:.2g} in the mean"


def _report(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


def _first(run: _Run, runs: Sequence[_Run]) -> _Run:
    return next(each for each in runs if each.recipe == run.recipe)


def _ratio(run: _Run, baseline: _Run) -> Estimate | None:
    if not run.seconds or len(run.seconds) != len(baseline.seconds):
        return None
    return estimate([a / b for a, b in zip(baseline.seconds, run.seconds, strict=True)])


def _cells(run: _Run, baseline: _Run) -> list[str]:
    if not run.seconds:
        return [run.recipe, run.label, "", "", "", "", run.status]
    step, ratio = estimate(run.seconds), _ratio(run, baseline)
    speed = "" if ratio is None else f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return [
        run.recipe,
        run.label,
        f"{1e3 * step.ratio:.4g} ({1e3 * step.low:.4g} to {1e3 * step.high:.4g})",
        speed,
        f"{run.warm['samples'] / step.ratio:.1f}",
        f"{run.peak_mib:.0f}",
        run.status or "equal",
    ]


def _write(out: Path, environment: Mapping[str, Any], runs: Sequence[_Run]) -> Path:
    """Write `bench.json`, and return its path."""
    entries = [
        {
            "recipe": run.recipe,
            "run": run.label,
            "seconds": run.seconds,
            "samples_per_step": run.warm.get("samples"),
            "ratio": ratio and asdict(ratio),
            "peak_mib": run.peak_mib,
            "losses": run.warm.get("losses"),
            "status": run.status,
        }
        for run in runs
        for ratio in [_ratio(run, _first(run, runs))]
    ]
    file = out / "bench.json"
    if is_main_process():
        write_text(file, json.dumps({**environment, "runs": entries}, indent=1) + "\n")
    return file


def _environment() -> dict[str, Any]:
    """Return the command, the date, the machine details and the package versions."""
    packages = ["slipstream", *(name for name in FRAMEWORKS if is_installed(name))]
    distributions = packages_distributions()  # `mmengine` is also in the distribution `onedl-mmengine`
    return {
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": cores(),
        **collect_env(),
        **{name: version(distributions.get(name, [name])[0]) for name in packages},
    }
