"""Train OpenMMLab's stock configurations with Slipstream and with MMEngine, and compare the step times.

    python benchmarks/openmmlab.py --limit 20m --out benchmarks/results/openmmlab.md

Run this script in the environment of `make openmmlab`. Each configuration is trained, validated, saved and resumed with
Slipstream on a small generated dataset. Four engines then train the configuration, each in its own process: MMEngine,
Slipstream without options, with `fused`, and with `fused` and `precision=bf16` (MMEngine has no mixed precision on the
CPU). The processes take turns, a few steps at a time. Afterwards, MMEngine and Slipstream with `fused` and `compile`
take turns, so that compilation does not slow down the other engines. The step time includes data loading and hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from report import environment_info, text_table, write_result
from slipstream.config.duration import read_duration

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests/openmmlab"
sys.path.append(str(TESTS))

from library_cases import CASES, Case, folder, missing  # noqa: E402

COMPILED = "Slipstream, fused and compile"
ENGINES: dict[str, tuple[str, Sequence[str]]] = {
    "MMEngine": ("mmengine", ()),
    "Slipstream": ("slipstream", ()),
    "Slipstream, fused": ("slipstream", ["speed.fused=True"]),
    "Slipstream, fused and bf16": ("slipstream", ["speed.fused=True", "speed.precision=bf16"]),
    COMPILED: ("slipstream", ["speed.fused=True", "speed.compile=True"]),
}
"""Worker engine and options of each contender."""
WARMUP = 12
"""Number of untimed steps. A second graph is compiled after eight batches whose shapes differ from the first's."""
ROUNDS = 7
ROUND_SECONDS = 2.0
UNCOMPILED = tuple(name for name in ENGINES if name != COMPILED)
_UNCOMPILED_FRACTION = 0.4
"""Fraction of a case's remaining time in which the engines without compilation are measured."""


class WorkerError(Exception):
    """A worker process failed, or did not respond before the time limit."""


class Worker:
    """A process that trains a case with one engine."""

    def __init__(self, engine: str, case: Case, work: Path, options: Sequence[str]) -> None:
        self.log = work / f"{engine}.log"
        command = [sys.executable, HERE / "openmmlab_worker.py", ENGINES[engine][0], self.log]
        command += [work / "config.py", work / engine, *options]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
            cwd=work,
        )

    def start(self, steps: int) -> None:
        """Request `steps` training steps from the process, and return immediately."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` reports the error of a process that has exited
            print(steps, file=self._process.stdin, flush=True)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the response to `start`, and return it.

        Raises:
            WorkerError: if the process failed, or did not respond within `seconds`.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(seconds, 0))[0]:
            raise WorkerError(
                f"timed out after {seconds:.0f} s" if seconds > 0 else "not measured (time limit reached)"
            )
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(last_error(self.log))
        response: dict[str, Any] = json.loads(line)
        return response

    def train(self, steps: int, seconds: float) -> dict[str, Any]:
        """Train for `steps` steps, and return the response.

        Raises:
            WorkerError: if the process failed, or did not respond within `seconds`.
        """
        self.start(steps)
        return self.receive(seconds)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent / "src"), str(TESTS / "shims"), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path}


def last_error(log: Path) -> str:
    """Return the last line of a log that starts with the name of an exception."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    errors = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception|Interrupt)\b", line)]
    return errors[-1][:200] if errors else "the process ended without an error message"


def check_training(case: Case, work: Path, data: Path, resume: bool, seconds: float) -> str:
    """Train, validate and save with the library's own script; return 'yes' or the reason for the failure."""
    first, last = (2, 4) if case.iterations else (1, 2)
    command = [sys.executable, "-m", "slipstream.openmmlab", folder(case.library) / ".mim/tools/train.py"]
    command += [work / "config.py", "--work-dir", work / "checked", *(["--resume"] if resume else [])]
    command += ["--cfg-options", *case.options(data, last if resume else first)]
    log = work / f"checked{resume:d}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            process = subprocess.run(
                [str(part) for part in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                timeout=max(seconds, 1),
                cwd=work,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"timed out after {seconds:.0f} s"
    if process.returncode:
        return last_error(log)
    text = log.read_text(encoding="utf-8")
    complete = case.metric in text and "Saved checkpoint" in text and (not resume or "Resumed after" in text)
    return "yes" if complete else "no metric or checkpoint in the log"


def start_workers(engines: Sequence[str], case: Case, work: Path, data: Path) -> dict[str, Worker]:
    """Start a process for each engine."""
    common = [*case.options(data, 10**6), "default_hooks.checkpoint.interval=1000000"]
    common.append("default_hooks.logger.interval=50")
    return {engine: Worker(engine, case, work, [*common, *ENGINES[engine][1]]) for engine in engines}


def measure(workers: dict[str, Worker], warmup: int, end: float) -> dict[str, Any]:
    """Return the seconds per step in each round for each engine, the scope of the compiled code, and failures.

    All workers are stopped at the end. If one of them fails during the warm-up, the others are still measured.
    """
    failures: dict[str, str] = {}
    scope = None
    rounds: dict[str, list[float]] = {}
    running = dict(workers)
    try:
        for engine in list(running):
            try:
                response = running[engine].train(warmup, end - time.monotonic())
                scope = response["scope"] or scope
            except WorkerError as error:
                failures[engine] = str(error)
                del running[engine]
        rounds = measure_rounds(running, end)
    except WorkerError as error:
        failures["rounds"] = str(error)
    finally:
        for worker in workers.values():
            worker.stop()
    return {"seconds": rounds, "scope": scope, "failures": failures}


def measure_rounds(workers: dict[str, Worker], end: float) -> dict[str, list[float]]:
    """Return the median seconds per step in each round for each engine. The engines take turns."""
    names = list(workers)
    rounds: dict[str, list[float]] = {engine: [] for engine in names}
    slowest = max((w.train(3, end - time.monotonic())["times"][-1] for w in workers.values()), default=1)
    steps = max(3, min(50, round(ROUND_SECONDS / slowest)))
    for index in range(ROUNDS if names else 0):
        if end - time.monotonic() < 1.5 * len(names) * steps * slowest:
            break
        for engine in names[index % len(names) :] + names[: index % len(names)]:
            # The batch of the first step is loaded before the command arrives.
            times = workers[engine].train(steps + 1, end - time.monotonic())["times"][1:]
            rounds[engine].append(median(times))
    return rounds


def fallback_warning(log: Path) -> str | None:
    """Return the warning that explains why the step is not a single graph, without folder paths."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    match = re.search(r"WARNING - (The step (?:cannot|is not).*)", text)
    return re.sub(r"/\S*/site-packages/", "", match[1]) if match else None


def run(name: str, limit: float, measures: bool) -> dict[str, Any]:
    """Run a case within `limit` seconds, and return its result; `measures` is whether to measure times."""
    case = CASES[name]
    if (reason := missing(case)) is not None:
        return {"library": case.library, "name": name, "config": case.config, "missing": reason}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "config.py").write_text(case.text(), encoding="utf-8")
        data = case.write(work / "data")
        trains = check_training(case, work, data, False, limit)
        resumes = check_training(case, work, data, True, limit) if trains == "yes" else "no"
        load = round(os.getloadavg()[0], 2)
        phases = []
        if measures:
            now = time.monotonic()
            ends = (now + (start + limit - now) * _UNCOMPILED_FRACTION, start + limit)
            for engines, warmup, end in zip(
                (UNCOMPILED, ("MMEngine", COMPILED)), (3, WARMUP), ends, strict=True
            ):
                phases.append(measure(start_workers(engines, case, work, data), warmup, end))
        reason = fallback_warning(work / f"{COMPILED}.log")
    return {
        "library": case.library,
        "name": name,
        "config": case.config,
        "trains": trains,
        "resumes": resumes,
        "load": load,
        "phases": phases,
        "reason": reason,
    }


def ratios(phase: dict[str, Any], engine: str) -> list[float]:
    """Return the engine's step time divided by MMEngine's, for each round."""
    seconds = phase["seconds"]
    if engine not in seconds or "MMEngine" not in seconds:
        return []
    return [a / b for a, b in zip(seconds[engine], seconds["MMEngine"], strict=False)]


def cell(case: dict[str, Any], engine: str) -> str:
    """Return an engine's median step time and its ratio to MMEngine's, or the reason why no time was measured."""
    for phase in case["phases"]:
        if times := phase["seconds"].get(engine):
            text = f"{1000 * median(times):.1f}"
            if engine != "MMEngine" and (found := ratios(phase, engine)):
                text += f" ({median(found):.2f}; {min(found):.2f} to {max(found):.2f})"
            return text
        if engine in phase["failures"]:
            return str(phase["failures"][engine])
    return "not measured"


def summary(cases: Sequence[dict[str, Any]]) -> str:
    """Return a table of all cases, and the reason for each case whose step is not a single graph."""
    rows, notes = [], []
    measured = any(case.get("phases") for case in cases)
    engines = list(ENGINES) if measured else []
    for case in cases:
        if "missing" in case:
            rows.append([case["library"], case["name"], case["missing"], *[""] * (2 + len(engines))])
            continue
        compiled = case["phases"][-1] if case["phases"] else None
        scope = (
            (compiled["scope"] or "none") if compiled and COMPILED in compiled["seconds"] else "not measured"
        )
        cells = [cell(case, engine) for engine in engines]
        rows.append([case["library"], case["name"], case["trains"], case["resumes"], scope, *cells])
        if case["reason"]:
            notes.append(f"- {case['name']}: {case['reason']}")
    header = ["library", "configuration", "trains, validates and saves", "resumes", "compiled"]
    header += [f"{engine}, ms per step" for engine in engines]
    text = text_table(header, rows)
    return f"{text}\n\n{chr(10).join(notes)}" if notes else text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"configurations: {', '.join(CASES)} (default: all)")
    parser.add_argument("--limit", default="20m", help="time limit for the whole command (default: 20m)")
    parser.add_argument(
        "--only-check", action="store_true", help="train and resume, but do not measure times"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write Markdown to this file and JSON next to it, and keep earlier results of other configurations",
    )
    args = parser.parse_args(argv)
    names = args.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    end = time.monotonic() + read_duration(args.limit, "limit")
    info = environment_info(
        ["onedl-mmengine", "onedl-mmcv", "onedl-mmpretrain", "onedl-mmsegmentation", "onedl-mmdetection"]
    )
    info["mmengine"] = info.pop("onedl-mmengine")
    cases = earlier_cases(args.out) if args.out else {}
    for index, name in enumerate(names):
        now = time.monotonic()
        case = run(name, (end - now) / (len(names) - index), not args.only_check)
        cases[name] = case | {"date": info["date"], "command": info["command"]}
        rows = [cases[name] for name in CASES if name in cases]
        text = summary(rows)
        print(next(line for line in text.splitlines() if f"| {name} |" in line), flush=True)
        if args.out:
            write_result(args.out, "OpenMMLab's libraries", info, text, {"cases": rows})
    return 0


def earlier_cases(out: Path) -> dict[str, dict[str, Any]]:
    """Return the cases in an existing result by name. A run replaces only the cases that it measures."""
    try:
        return {case["name"]: case for case in json.loads(out.with_suffix(".json").read_text())["cases"]}
    except FileNotFoundError:
        return {}


if __name__ == "__main__":
    sys.exit(main())
