"""Measure the time that the run report adds to a training step of the recipe street_scenes_pp_lite_t on a CPU.

    python benchmarks/report_overhead.py --steps 60 --rounds 15 --out benchmarks/results/report_overhead.md

The difference between runs with and without the report is smaller than the noise in their times. Therefore, the
report's work is measured directly: the recipe trains with one thread, and each round repeats the report's work for one
step many times.

- The timer: the calls in one step, in the order recorded during training.
- The hook: one call that reads the losses, with new values for each scalar and for the process's memory. The time of
  this call is divided by the log interval.

All times are CPU times, because other programs may use the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from report import environment_info, table, write_result
from slipstream.cli.configure import load_config
from slipstream.hooks import Hook, LoggerHook, ReportHook
from slipstream.logging import PhaseTimes
from slipstream.runner import Runner
from slipstream.training.config_paths import at_user_paths

RECIPE = "street_scenes_pp_lite_t"


class Recorder(PhaseTimes):
    """A timer that stores the phases of the current step and those of the last completed step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.step: tuple[str, ...] = ()

    def switch(self, phase: Any) -> None:
        self.calls.append(phase)
        super().switch(phase)

    def end_step(self) -> None:
        super().end_step()
        self.step, self.calls = tuple(self.calls[:-1]), []  # the last call belongs to end_step


class Clock(Hook):
    """A hook that stores the CPU time at the end of each step, and the phases of a step without a log line."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.times: list[float] = []
        self.phases: tuple[str, ...] = ()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        steps = runner.phases.step
        self.phases = min((p for p in (self.phases, steps) if p), key=len, default=())

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.times.append(process_time())


def train_recipe(steps: int, folder: str) -> tuple[Runner, Clock]:
    """Train the recipe, and return its Runner and the hook that recorded its steps."""
    batches = f"train_dataloader.dataset.length={4 * steps}"
    cfg = load_config(RECIPE, ["train_cfg.max_epochs=1", batches, "param_scheduler=null"], None, True).cfg
    for mode in ("val", "test"):
        for part in ("dataloader", "cfg", "evaluator"):
            cfg[f"{mode}_{part}"] = None
    cfg.default_hooks = {**cfg.default_hooks, "checkpoint": None}
    cfg.work_dir, cfg.log_level = folder, "ERROR"
    clock = Clock()
    with at_user_paths(cfg):
        runner = Runner.from_cfg(cfg)
    runner.phases = Recorder()
    runner.register_hook(clock)
    runner.train()
    return runner, clock


def timer_us(step: tuple[str, ...], repeats: int) -> float:
    """Return the CPU time of the timer calls in one step, in microseconds."""
    phases: Any = PhaseTimes()
    phases.start()
    start = process_time()
    for _ in range(repeats):
        for phase in step:
            phases.switch(phase)
        phases.end_step()
    return 1e6 * (process_time() - start) / repeats


def reading_us(runner: Runner, hook: ReportHook, interval: int, repeats: int) -> float:
    """Return the CPU time of one `read_logs` call after `interval` steps, in microseconds."""
    histories = [
        history for key, history in runner.message_hub.log_scalars.items() if key.startswith("train/")
    ]
    hook.before_train(runner)
    seconds = 0.0
    for _ in range(repeats):
        for history in histories:
            for value in range(interval):
                history.update(float(value))
        # Force a memory reading. In training, enough time passes between two calls for a new reading.
        hook._last_memory_time = float("-inf")
        runner.phases.samples += interval * runner.samples_per_step
        start = process_time()
        hook.read_logs(runner)
        seconds += process_time() - start
    return 1e6 * seconds / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of the recipe")
    parser.add_argument("--rounds", type=int, default=15, help="number of measurements of the report's work")
    parser.add_argument("--repeats", type=int, default=5000, help="repetitions in each measurement")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    info = environment_info() | {"recipe": RECIPE, "steps": args.steps, "n (rounds)": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        runner, clock = train_recipe(args.steps, folder)
        hook = next(hook for hook in runner.hooks if isinstance(hook, ReportHook))
        interval = next(hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook))
        step_ms = [1e3 * (end - start) for start, end in zip(clock.times[1:], clock.times[2:], strict=False)]
        timer, reading = [], []
        for index in range(args.rounds):
            timer.append(timer_us(clock.phases, args.repeats))
            reading.append(reading_us(runner, hook, interval, args.repeats // 10))
            print(f"round {index + 1}/{args.rounds}: {timer[-1]:.2f} µs, {reading[-1]:.1f} µs", flush=True)
        start = process_time()
        hook.release(runner)
        write_ms = 1e3 * (process_time() - start)
    data = {"interval": interval, "phases of a step": clock.phases, "step_ms": step_ms, "timer_us": timer,
            "reading_us": reading, "write_ms": write_ms}  # fmt: skip
    text = summary(data)
    print(text)
    if args.out:
        write_result(args.out, "Overhead of the run report", info, text, data)


def summary(data: dict[str, Any]) -> str:
    """Return the result table."""
    interval, step = data["interval"], 1e3 * median(data["step_ms"])
    per_step = [value / interval for value in data["reading_us"]]
    total = [a + b for a, b in zip(data["timer_us"], per_step, strict=True)]

    def row(name: str, values: list[float]) -> list[str]:
        percent = f"{100 * median(values) / step:.4f} %"
        return [name, f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})", percent]

    rows = [
        row(f"timer, {len(data['phases of a step']) + 1} clock readings", data["timer_us"]),
        row(f"hook, one reading every {interval} steps, divided by {interval}", per_step),
        row("both", total),
    ]
    header = ["work", "µs of CPU time per step (minimum to maximum)", "relative to the step"]
    return (
        f"{table(header, rows)}\n\nThe median step takes {step / 1e3:.0f} ms of CPU time. With "
        f"{median(total) / 10:.1f} ms steps, the report's overhead would be 1% of the step time. "
        f"At the end of the run, writing the report takes {data['write_ms']:.0f} ms."
    )


if __name__ == "__main__":
    main()
