"""`slipstream profile`: record training steps, and show where the time is spent."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.child import interrupt_on_sigterm
from slipstream.cli.configure import configure
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from torch.profiler import profile

    from slipstream.cli.profiling import StepProfiler
    from slipstream.config import Config

__all__ = ["prepare_output_folder", "run"]

_MAX_OPERATIONS = 15


def run(args: argparse.Namespace) -> int:
    """Profile the steps, write the trace and the memory timeline, and print a summary.

    Raises:
        ConfigError: the configuration sets a launcher, the output folder is not writable, or training ends before all
            steps have run.
    """
    from slipstream.cli.profiling import StepProfiler
    from slipstream.devices import default_device

    cfg = configure(args)
    if cfg.get("launcher", "none") != "none":
        raise ConfigError("only a single process can be profiled; set launcher=none", "launcher")
    out = prepare_output_folder(Path(args.out) if args.out else Path(cfg.work_dir) / "profile")
    hook = StepProfiler(args.warmup, args.steps, args.stacks, default_device())
    _train(cfg, hook)
    if hook.profile is None:
        raise ConfigError(
            f"training ended after {hook.done} of {hook.needed} steps ({args.warmup} for warm-up, {args.steps} timed, "
            f"1 to start the profiler, and {args.steps} recorded). Reduce `--steps` or `--warmup`, or train for longer"
        )
    events = _write_trace(hook.profile, out / "trace.json.gz")
    print(_summary(hook, args.steps))
    print(_memory(events, out / "memory.csv"))
    print(f"Trace: {out / 'trace.json.gz'} (open it in https://ui.perfetto.dev or chrome://tracing)")
    return 0


def prepare_output_folder(out: Path) -> Path:
    """Create the output folder and a temporary file in it, so that write errors are raised before the steps run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        raise ConfigError(
            f"cannot write to the folder '{out}': {error.strerror or error}; choose a different folder",
            "--out",
        ) from error


def _train(cfg: Config, hook: StepProfiler) -> None:
    """Train without validation, checkpoints, reports or trackers until the hook has recorded its steps."""
    from slipstream.cli.profiling import Finished
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths
    from slipstream.tune.measured_config import keep_training_only

    with (
        interrupt_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="slipstream-") as folder,
        at_user_paths(cfg),
    ):
        keep_training_only(cfg, folder)  # only the profile is kept
        runner = Runner.from_cfg(cfg)
        runner.register_hook(hook)
        with suppress(Finished):
            runner.train()


def _write_trace(recorded: profile, path: Path) -> list[dict[str, Any]]:
    """Write the trace and return its events."""
    from slipstream.files import atomic_write

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        with (
            atomic_write(path) as temporary,
            plain.open("rb") as source,
            gzip.open(temporary, "wb") as target,
        ):
            shutil.copyfileobj(source, target)
        events: list[dict[str, Any]] = json.loads(plain.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _summary(hook: StepProfiler, steps: int) -> str:
    """Return a summary of the step time, the wait for data, the slowest operations and the synchronizations."""
    per_step = hook.seconds / steps
    lines = [
        f"Step: {per_step * 1e3:.1f} ms, {hook.samples / hook.seconds:.1f} samples/s "
        f"(mean of {_step_count(steps)} without the profiler)",
        f"Waiting for data: {hook.wait_seconds / hook.seconds:.1%} of this time "
        f"({hook.wait_seconds / steps * 1e3:.2f} ms per step)",
        "",
        *_operations(hook.profile, steps),
        "",
    ]
    synchronizations = hook.synchronizations
    if synchronizations.problem:
        return "\n".join([*lines, f"Host-device synchronizations: {synchronizations.problem}"])
    total = sum(synchronizations.lines.values())
    lines.append(f"Host-device synchronizations in {_step_count(steps)}: {total or 'none'}")
    return "\n".join(
        [*lines, *(f"  {count:4}x {line}" for line, count in synchronizations.lines.most_common())]
    )


def _step_count(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _operations(recorded: profile | None, steps: int) -> Iterator[str]:
    """Yield a table of the slowest operations, line by line. An operation's time excludes the operations it calls."""
    assert recorded is not None
    rows = [event for event in recorded.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in rows)
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows.sort(key=lambda event: getattr(event, name), reverse=True)
    total = sum(getattr(event, name) for event in rows) or 1
    yield f"{'slowest operations (' + ('device' if on_device else 'CPU') + ' time)':50} ms/step  share  calls/step"
    for event in rows[:_MAX_OPERATIONS]:
        time = getattr(event, name)
        yield f"  {event.key[:47]:48} {time / steps / 1e3:7.2f} {time / total:6.1%} {event.count / steps:11.1f}"


def _memory(events: list[dict[str, Any]], path: Path) -> str:
    """Write the allocated memory over time to a CSV file, and return a summary."""
    from slipstream.files import atomic_write

    rows = [
        (
            event["ts"],
            event["args"]["Device Type"],
            event["args"]["Device Id"],
            event["args"]["Total Allocated"],
        )
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Total Allocated") is not None
    ]
    devices = [row for row in rows if row[1] != 0] or rows  # type 0 is the CPU
    if not devices:
        return "Memory: this device does not report allocations to the profiler"
    start = min(row[0] for row in rows)
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["milliseconds", "device_type", "device_id", "allocated_bytes"])
        writer.writerows([f"{(row[0] - start) / 1e3:.3f}", *row[1:]] for row in sorted(rows))
    allocated = [row[3] for row in devices]
    label = "device memory" if devices[0][1] != 0 else "CPU tensors allocated since recording started"
    low, high = min(allocated) / 2**20, max(allocated) / 2**20
    return f"Memory ({label}): {low:,.1f} to {high:,.1f} MiB; over time: {path}"
