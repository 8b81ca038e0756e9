"""`slipstream profile`: record training steps, and show where the time is spent."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, schedule

from slipstream.cli.configure import configure
from slipstream.cli.processes import interrupt_on_sigterm
from slipstream.devices import default_device
from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from slipstream.tune.jobs import keep_training_only

if TYPE_CHECKING:
    from slipstream.runner import Runner

_MAX_OPERATIONS = 15


def run(args: argparse.Namespace) -> int:
    """Profile the steps, write the trace, and print a summary.

    Raises:
        ConfigError: the configuration sets a launcher, the output folder is not writable, or training ends before all
            steps have run.
    """
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths

    cfg = configure(args)
    if cfg.get("launcher", "none") != "none":
        raise ConfigError("only a single process can be profiled; set launcher=none", "launcher")
    out = prepare_output_folder(Path(args.out) if args.out else Path(cfg.work_dir) / "profile")
    hook = _StepProfiler(args.warmup, args.steps)
    with (
        interrupt_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="slipstream-") as folder,
        at_user_paths(cfg),
    ):
        keep_training_only(cfg, folder)  # only the profile is kept
        runner = Runner.from_cfg(cfg)
        runner.register_hook(hook)
        with suppress(_FinishedError):
            runner.train()
    if hook.done < hook.needed:
        raise ConfigError(
            f"training ended after {hook.done} of {hook.needed} steps ({args.warmup} for warm-up, {args.steps} timed, "
            f"1 to start the profiler, and {args.steps} recorded); reduce `--steps` or `--warmup`"
        )
    trace = out / "trace.json.gz"
    hook.profile.export_chrome_trace(str(trace))
    print(hook.summary())
    print(f"Trace: {trace} (open it in https://ui.perfetto.dev or chrome://tracing)")
    return 0


def prepare_output_folder(out: Path) -> Path:
    """Create the output folder and a temporary file in it, so that write errors are raised before the steps run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        raise ConfigError(
            f"cannot write to the folder '{out}': {error.strerror or error}", "--out"
        ) from error


class _FinishedError(Exception):
    """Raised to end training after the last recorded step."""


class _StepProfiler(Hook):
    """Times steps without the profiler, then records steps with the profiler, and ends training."""

    priority = "LOWEST"
    reads_phases = True

    def __init__(self, warmup: int, steps: int) -> None:
        self.profile = profile(
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), record_shapes=True, profile_memory=True,
            acc_events=True,
        )  # fmt: skip
        self.needed = warmup + 2 * steps + 1
        # Number of finished steps.
        self.done = 0
        self._warmup, self._steps, self._device = warmup, steps, default_device()
        self._seconds = self._wait_seconds = 0.0
        self._samples = 0
        self._exit = ExitStack()
        self._warnings: list[Any] = []

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Start and stop timing and recording, and end training after the last step."""
        self.done += 1
        if self._warmup < self.done <= self._warmup + self._steps:
            self._samples += runner.train_loop.step_samples
        if self.done == self._warmup + self._steps:
            self._synchronize()
            self._seconds += perf_counter()
            self._wait_seconds += runner.phases.total("data")
            self.profile.start()
            self._warnings = self._exit.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            self._set_sync_warnings("warn")
        elif self.done > self._warmup + self._steps:
            self.profile.step()
        if self.done == self.needed:
            self.after_train(runner)
            raise _FinishedError
        if self.done == self._warmup:
            self._synchronize()
            self._seconds, self._wait_seconds = -perf_counter(), -runner.phases.total("data")

    def after_train(self, runner: Runner) -> None:
        """Stop recording."""
        if self.done >= self._warmup + self._steps:
            self._set_sync_warnings("default")
            self._exit.close()
            self.profile.stop()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _set_sync_warnings(self, mode: str) -> None:
        """Set whether torch warns about calls that wait for the device (CUDA only)."""
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def summary(self) -> str:
        """Return the step time, the wait for data, the slowest operations and the synchronizations."""
        rows = self.profile.key_averages()
        name = "self_device_time_total" if self._device.type != "cpu" else "self_cpu_time_total"
        table = rows.table(sort_by=name, row_limit=_MAX_OPERATIONS, max_name_column_width=50)
        lines = [
            f"Step: {self._seconds / self._steps * 1e3:.1f} ms, {self._samples / self._seconds:.1f} samples/s "
            f"(mean of {self._steps} steps without the profiler)",
            f"Waiting for data: {self._wait_seconds / self._seconds:.1%} of this time",
            table,
        ]
        if self._device.type == "cuda":
            found = [item for item in self._warnings if "called a synchronizing" in str(item.message)]
            counts = Counter(f"{item.filename}:{item.lineno}" for item in found)
            lines.append(f"Host-device synchronizations in {self._steps} steps: {len(found)}")
            lines += [f"  {count:4}x {line}" for line, count in counts.most_common()]
        return "\n".join(lines)
