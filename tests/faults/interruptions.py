"""Interrupt and damage training runs at random, resume them, and compare them with an uninterrupted run.

Run `python tests/faults/interruptions.py --count 1000` with src/ in PYTHONPATH. The script prints a table. Its exit
status is 1 if a run lost its results or silently ended with a different final checkpoint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.errors import SlipstreamError
from slipstream.preemption import EXIT_STATUS, SIGNALS
from slipstream.runner import Runner
from tiny_runs import Net, Noisy, loader, training, validation

FAULTS = (
    "SIGKILL",
    "signal",
    "flipped bits",
    "zeroed sector",
    "truncated file",
    "deleted file",
    "second run",
)
"""Faults of a trial. The first two stop the run at a random time. The next four damage its last checkpoint.
The last one starts a second run in the same folder."""
OUTCOMES = ("same result", "reported", "lost", "silent")
EPOCHS = 5
FINAL = f"epoch_{EPOCHS}.pth"
_START, _END = "<!-- faults: start -->", "<!-- faults: end -->"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "slipstream.runner", "tiny_runs"])


class Slow(Noisy):
    """A dataset whose samples take about as long as a step, so that signals arrive at every stage of a run."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


def train(folder: Path, result: Any) -> None:
    """Train or resume the run in `folder`. Send the error's type and message, or None, through `result`."""
    os.setsid()  # a signal is sent to the process and its workers
    torch.set_num_threads(1)
    with (folder.with_suffix(".txt")).open("a") as log, redirect_stdout(log), redirect_stderr(log):
        options = training(
            folder,
            model=dict(type=Net, dropout=0.3, norm=True),
            train_dataloader=loader(Slow(), num_workers=1, multiprocessing_context="fork"),
            train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01), accumulative_counts=3),
            custom_hooks=[dict(type="EMAHook")],
            resume=True,
            **validation(),
        )
        try:
            Runner(**options).train()
        except SlipstreamError as error:
            result.send((type(error).__name__, str(error)))
        else:
            result.send(None)


def start(folder: Path) -> tuple[Any, Any]:
    """Start `train` in a new process. Return the process and a connection that receives its result."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=train, args=(folder, sender))
    process.start()
    sender.close()
    return process, receiver


def finish(folder: Path, limit: float = 120) -> tuple[int | None, Any]:
    """Train to the end. Return the exit status and the error, if any."""
    process, receiver = start(folder)
    process.join(limit)
    stop(process, signal.SIGKILL)
    return process.exitcode, error_of(receiver)


def error_of(receiver: Any) -> Any:
    try:
        return receiver.recv() if receiver.poll() else None
    except EOFError:
        return None


def stop(process: Any, number: int) -> None:
    """Send a signal to the process group, or to the process if it has no process group yet."""
    for send in (os.killpg, os.kill):
        try:
            send(process.pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        break
    if number == signal.SIGKILL:
        process.join()


def results(folder: Path) -> dict[str, Any]:
    """Return everything in the final checkpoint that an interruption must not change."""
    content = torch.load(folder / FINAL, weights_only=True)
    kept = {key: content[key] for key in ("state_dict", "ema_state_dict", "optimizer")}
    return {**kept, "epoch": content["meta"]["epoch"], "iter": content["meta"]["iter"]}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ---- faults ----------------------------------------------------------------------------------------------------------


def interrupted(folder: Path, rng: random.Random, signals: list[int], duration: float) -> str:
    """Send signals to the run and to its restarts at random times. Return the problem, or an empty string."""
    for number in signals:
        process, receiver = start(folder)
        time.sleep(rng.uniform(0, duration))
        stop(process, number)
        process.join(60)
        if process.is_alive():
            stop(process, signal.SIGKILL)
            return f"{signal.Signals(number).name} did not end the run"
        if (error := error_of(receiver)) is not None:
            return str(error)
        interrupted_by_python = (
            number == signal.SIGINT and process.exitcode == 1
        )  # outside the training loop, SIGINT raises KeyboardInterrupt
        if process.exitcode not in (0, EXIT_STATUS, -number) and not interrupted_by_python:
            return f"{signal.Signals(number).name} ended the run with status {process.exitcode}"
    return ""


def damaged(folder: Path, rng: random.Random, fault: str, duration: float) -> None:
    """Stop the run at a random time and damage its last checkpoint, if there is one."""
    process, _ = start(folder)
    time.sleep(rng.uniform(duration / 2, duration))
    stop(process, signal.SIGKILL)
    files = [path for path in folder.glob("epoch_*.pth") if path.name != FINAL]
    files.sort(key=lambda path: path.stat().st_mtime)
    if not files:
        return
    content = bytearray(files[-1].read_bytes())
    position = rng.randrange(len(content))
    if fault == "deleted file":
        files[-1].unlink()
        return
    if fault == "flipped bits":
        for _ in range(rng.choice((1, 1, 2, 8))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif fault == "zeroed sector":
        content[position // 512 * 512 : position // 512 * 512 + 512] = bytes(512)
    else:
        del content[position:]
    files[-1].write_bytes(content)


def second_run(folder: Path, rng: random.Random, duration: float) -> str:
    """Start a second run in the folder of a running one. The second run must be refused. Return the problem, or ''."""
    first, receiver = start(folder)
    while not (folder / ".lock").exists() and first.is_alive():
        time.sleep(0.01)
    time.sleep(rng.uniform(0.1, duration / 2))
    status, error = finish(folder)
    first.join(60)
    if error is not None:
        refused = error[0] == "ConfigError" and "is in use by process" in error[1]
        return "" if refused and error_of(receiver) is None else str(error)
    return "" if status == 0 and not first.is_alive() else f"the second run ended with status {status}"


def trial(fault: str, seed: int, folder: Path, expected: dict[str, Any], duration: float) -> tuple[str, str]:
    """Run one trial. Return its outcome and a description of the problem."""
    rng, problem = random.Random(f"{fault} {seed}"), ""
    if fault == "SIGKILL":
        problem = interrupted(folder, rng, [signal.SIGKILL] * 2, duration)
    elif fault == "signal":
        problem = interrupted(folder, rng, [rng.choice(SIGNALS), rng.choice(SIGNALS)], duration)
    elif fault == "second run":
        problem = second_run(folder, rng, duration)
    else:
        damaged(folder, rng, fault, duration)
    status, error = finish(folder)
    if problem or (error is None and status != 0):
        return "lost", problem or f"the resumed run ended with status {status}"
    if error is not None:
        return "reported", str(error)
    return (
        ("same result", "") if same(results(folder), expected) else ("silent", "different final checkpoint")
    )


def run(count: int, seed: int, report: Callable[[str], None]) -> dict[str, Counter[str]]:
    """Run `count` trials that cycle through the faults. Return the number of each outcome by fault."""
    table: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "whole")
        finish(whole)
        began = time.monotonic()
        status, error = finish(Path(name, "again"))
        duration = time.monotonic() - began
        expected = results(whole)
        if status != 0 or error is not None or not same(results(Path(name, "again")), expected):
            raise RuntimeError(f"uninterrupted runs differ or fail: {status}, {error}")
        for number in range(seed, seed + count):
            fault, folder = FAULTS[number % len(FAULTS)], Path(name, str(number))
            outcome, problem = trial(fault, number, folder, expected, duration)
            table[fault][outcome] += 1
            if problem:
                log = folder.with_suffix(".txt").read_text() if outcome in ("lost", "silent") else ""
                report(f"--- seed {number}, {fault}: {outcome}: {problem}\n{log}")
            shutil.rmtree(folder, ignore_errors=True)
    return table


def markdown(table: dict[str, Counter[str]]) -> str:
    """Return the table of outcomes."""
    lines = [f"| fault | tried | {' | '.join(OUTCOMES)} |", "|---" + "|---:" * (len(OUTCOMES) + 1) + "|"]
    for fault, counts in table.items():
        cells = [counts.total(), *(counts[outcome] or "none" for outcome in OUTCOMES)]
        lines.append(f"| {fault} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="page in which to replace the table")
    options = parser.parse_args()
    table = run(options.count, options.seed, lambda text: print(text, flush=True))
    print(markdown(table))
    if options.page is not None:
        before, after = options.page.read_text().split(_START)[0], options.page.read_text().split(_END)[1]
        options.page.write_text(f"{before}{_START}\n{markdown(table)}\n{_END}{after}")
    return int(any(counts["lost"] or counts["silent"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
