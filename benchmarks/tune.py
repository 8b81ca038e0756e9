"""Measure the plans found by `slipstream tune` again, and compare them with single options and `speed="auto"`.

    python benchmarks/tune.py --limit 25m --budget 4m --out benchmarks/results/tune.md

For each recipe, the search runs once, in its own processes. Then the plan, the baseline, `speed="auto"` and each
option that the search measured run in separate processes that take turns. The order rotates between rounds, and ratios
are computed within each round. Each recipe gets an equal part of the remaining time. Contenders that cannot be measured
in that time are listed without a result.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from report import environment_info, table, write_result
from slipstream.cli.configure import load_config
from slipstream.tune import TuneResult, parse_budget, tune_config
from slipstream.tune.jobs import RunnerJob, Setting
from slipstream.tune.process import Process, TrialError
from slipstream.tune.statistics import estimate

RECIPES = (
    "street_scenes_pp_lite_t",
    "street_scenes_regseg48",
    "street_scenes_stdc1_seg",
    "street_scenes_ddrnet_23_slim",
)
PLAN, AUTO, BASELINE = "plan", 'speed="auto"', "baseline"
ROUND_SECONDS = 1.0
MAX_ROUNDS = 9
SEARCH_FRACTION = 0.55
"""Maximum fraction of a recipe's time for the search. The plan is measured again in the remaining time."""
MEASURED_STATUSES = ("adopted", "slower", "no gain", "inconclusive")
END_SECONDS = 5.0
"""Time in seconds that is reserved for terminating processes."""


@dataclass
class Contender:
    """A setting to measure: the plan, or a setting that the plan is compared with."""

    name: str
    setting: Setting
    seconds: list[float] = field(default_factory=list)
    """Time in seconds to train on the samples of one baseline batch, in each round."""
    problem: str = ""
    process: Process | None = None
    steps: int = 2
    untimed: int = 1
    accumulate: int = 1

    def start(self, cfg: Mapping[str, Any], stack: ExitStack, end: float) -> None:
        """Start the process and run the warm-up steps; stop at `end`, a value of `time.monotonic()`."""
        process = stack.enter_context(Process(RunnerJob(cfg, self.setting)))
        print(f"    {self.name}", end=": ", flush=True)
        try:
            warm = process.wait_for("warm", max(end - time.monotonic(), 0.0))
        except TrialError as failure:
            process.end()
            self.problem = f"{failure.status}: {failure.reason}"
            return
        if warm["problem"]:
            process.end()
            self.problem = warm["problem"]
            return
        step = sorted(process.warmup_seconds)[len(process.warmup_seconds) // 2]
        self.accumulate, self.untimed = warm["accumulate"], 1 + warm["buffered"]
        steps = max(2, math.ceil(ROUND_SECONDS / step))
        self.steps = math.ceil(steps / self.accumulate) * self.accumulate
        self.process = process

    def time(self, end: float) -> bool:
        """Time one round. Return whether it was completed before `end`."""
        assert self.process is not None
        try:
            timed = self.process.time(self.steps, self.untimed, max(end - time.monotonic(), 0.0))
        except TrialError as failure:
            if failure.status != "timed out":
                self.problem = f"{failure.status}: {failure.reason}"
            return False
        self.seconds.append(timed["seconds"])
        return True


def single_options(result: TuneResult) -> dict[str, Setting]:
    """Return the options that the search measured individually, fastest first."""
    rows = [row for row in result.rows if row.status in MEASURED_STATUSES and row.estimate is not None]
    rows.sort(key=lambda row: row.estimate.ratio if row.estimate else 0.0, reverse=True)
    return {row.label: row.setting for row in rows}


def contenders(result: TuneResult) -> list[Contender]:
    """Return the plan and the settings that it is compared with, excluding settings that are identical to the plan."""
    outcome = result.outcome
    plan = Contender(PLAN, outcome.setting)
    others = {BASELINE: Setting(), AUTO: Setting({"auto": True}), **single_options(result)}
    plan_key = (outcome.setting.speed, outcome.setting.num_workers, outcome.setting.batch_size)
    return [plan] + [
        Contender(name, setting)
        for name, setting in others.items()
        if (setting.speed, setting.num_workers, setting.batch_size) != plan_key
    ]


def measure(cfg: Mapping[str, Any], entries: Sequence[Contender], end: float) -> None:
    """Start all contenders and time them in turn; stop at `end`."""
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-tune-"))
        for index, contender in enumerate(entries):
            # Reserve the time that the contenders started so far, including this one, need for five rounds.
            reserve = 5 * 1.5 * ROUND_SECONDS * (index + 1)
            contender.setting = replace(contender.setting, compile_cache=cache)
            contender.start(cfg, stack, end - reserve)
            print(contender.problem or "ready", flush=True)
        running = [contender for contender in entries if contender.process is not None]
        for index in range(MAX_ROUNDS):
            offset = index % max(len(running), 1)
            complete = [contender.time(end) for contender in running[offset:] + running[:offset]]
            if not all(complete):
                break
    for contender in entries:
        contender.process = None


def ratios(plan: Contender, other: Contender) -> dict[str, Any] | None:
    """Estimate the time of `other` divided by the time of the plan. If the ratio is above 1, the plan is faster."""
    count = min(len(plan.seconds), len(other.seconds))
    values = [b / a for a, b in zip(plan.seconds[:count], other.seconds[:count], strict=True)]
    return asdict(estimate(values)) if values else None


def verdict(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "not measured"
    if ratio["rounds"] < 5:
        return "too few rounds"
    return "faster" if ratio["low"] > 1 else "slower" if ratio["high"] < 1 else "not distinguishable"


def run(recipe: str, budget: float, end: float, options: Sequence[str] | None) -> dict[str, Any]:
    """Tune a recipe and measure its plan again; stop at `end`."""
    seconds = min(budget, SEARCH_FRACTION * (end - time.monotonic()))
    cfg = load_config(recipe, trust=Path(recipe).suffix == ".py").cfg
    print(f"{recipe}: search with a budget of {seconds:.0f} s", flush=True)
    start = time.monotonic()
    result = tune_config(cfg, seconds, options, recipe, start=start)
    search_seconds = time.monotonic() - start
    print(result, flush=True)
    entries = contenders(result)
    measure(cfg, entries, end - END_SECONDS)
    plan = entries[0]
    return {
        "recipe": recipe,
        "budget": seconds,
        "search seconds": search_seconds,
        "adopted": result.outcome.adopted,
        "stopped": result.outcome.stopped,
        "rows": [[row.label, row.status, row.reason] for row in result.rows],
        "plan seconds": plan.seconds,
        "plan problem": plan.problem,
        "compared": [
            {
                "name": other.name,
                "seconds": other.seconds,
                "problem": other.problem,
                "ratio": (ratio := ratios(plan, other)),
                "plan is": verdict(ratio),
            }
            for other in entries[1:]
        ],
    }


def describe(case: dict[str, Any]) -> str:
    """Return the Markdown section of a recipe."""
    rows = []
    for other in case["compared"]:
        ratio = other["ratio"]
        cells = (
            [f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})", ratio["rounds"]]
            if ratio
            else ["", 0]
        )
        rows.append(
            [other["name"], *cells, other["plan is"] + (f" ({other['problem']})" if other["problem"] else "")]
        )
    plan = " + ".join(case["adopted"]) or "no option"
    stopped = f" Some options were not fully measured: {case['stopped']}." if case["stopped"] else ""
    comparison = "within" if case["search seconds"] <= case["budget"] else "longer than"
    return (
        f"## {case['recipe']}\n\nPlan: {plan}. The search took {case['search seconds']:.0f} s, {comparison} its "
        f"budget of {case['budget']:.0f} s, part of which is reserved for terminating processes.{stopped}\n\n"
        + table(
            [
                "compared with",
                "speed of the plan relative to this setting (interval)",
                "rounds",
                "result",
            ],
            rows,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help="recipes or configuration files")
    parser.add_argument("--budget", default="5m", help="maximum time for each search (default: 5m)")
    parser.add_argument("--limit", default="25m", help="time limit for the whole command (default: 25m)")
    parser.add_argument("--options", help="options to measure, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args(argv)
    end = time.monotonic() + parse_budget(args.limit)
    budget = parse_budget(args.budget)
    options = args.options.split(",") if args.options else None
    info = environment_info()
    cases: list[dict[str, Any]] = []
    for index, recipe in enumerate(args.recipes):
        now = time.monotonic()
        limit = now + (end - now) / (len(args.recipes) - index)
        cases.append(run(recipe, budget, limit, options))
        text = "\n\n".join(map(describe, cases))
        print(describe(cases[-1]), flush=True)
        if args.out:
            write_result(
                args.out, "Plans found by `slipstream tune`, measured again", info, text, {"cases": cases}
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
