"""Train the models of zoo_models.py with Slipstream and with plain loops, and compare losses, weights and step times.

    make zoo                                             # all models, in an environment with their libraries
    python benchmarks/zoo.py --only 'timm vit' --jobs 1  # some models; the others keep their results
    python benchmarks/zoo.py --missing                   # those without a result or step times

Each model is trained eagerly without options, which must be bitwise equal to the loop, and with `compile`, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from report import environment_info, text_table, write_result
from slipstream import accelerate
from zoo_models import MODELS, Entry

BATCHES, TIMED_STEPS, TIMEOUT, CHUNK = 6, 10, 300, 6
LARGE = 1e-5
"""Differences above this value are compared with the effect of a rounding error in the weights."""
LIBRARIES = [
    "timm",
    "transformers",
    "diffusers",
    "segmentation_models_pytorch",
    "monai",
    "torch_geometric",
    "torchvision",
]
NOTES = """{models} models. Eager: {bitwise} bitwise equal to the loop. Compiled as: {kinds}.

A number is the largest difference from the loop, relative to the norm of the tensor, and "rounding" is the difference
between two loops whose weights differ by one rounding error. The backend is aot_eager, which calls each operator
from Python, including the optimizer's; only models named inductor show the speed of compiled code. Each step time is
a median; the JSON file has the load of the machine for each model.

"""
NOT_RUN = {"error": "not run"}
Step = Callable[[Any], Any]


def optimizer_of(entry: Entry, model: nn.Module) -> torch.optim.Optimizer:
    if entry.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    # A gradient that is zero but for rounding (a bias before a softmax) would otherwise move its weight by the rate.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def plain_loop(entry: Entry, compiled: dict[str, Any] | None = None) -> tuple[Step, nn.Module]:
    """Return a hand-written training step and its model, which is compiled by torch if `compiled` is set."""
    seed(0)
    model = entry.build().train()
    optimizer = optimizer_of(entry, model)
    called: Any = model if compiled is None else torch.compile(model, **compiled)

    def step(batch: Any) -> Tensor:
        loss = entry.loss(called, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


def engine(entry: Entry, speed: dict[str, Any]) -> Any:
    seed(0)
    model = entry.build().train()
    return accelerate(model, optimizer_of(entry, model), speed=speed, compute_loss=entry.loss)


def train(entry: Entry, step: Any) -> tuple[list[float], list[Any]]:
    """Return the losses, and the random states at the end."""
    losses = []
    data = batches(entry, BATCHES)
    seed(1)
    for batch in data:
        log = step(batch)
        losses.append(float(log["loss"] if isinstance(log, dict) else log))
    return losses, [torch.get_rng_state().tolist(), random.getstate()]


def batches(entry: Entry, count: int) -> list[Any]:
    seed(2)
    return [entry.batch(number) for number in range(count)]


def difference(expected: Any, found: Any) -> float:
    """Return the largest difference of two lists or state dicts, relative to each tensor's norm (at least 0.01)."""
    if isinstance(expected, list):
        return max(
            abs(a - b) / max(abs(a), 1e-12) if a == a or b == b else 0.0
            for a, b in zip(expected, found, strict=True)
        )
    pairs = [(tensor, found[name]) for name, tensor in expected.items() if isinstance(tensor, Tensor)]
    numbers = [
        (a.double().norm(), (a.double() - b.double()).norm()) for a, b in pairs if not torch.equal(a, b)
    ]
    return max((float(error / norm.clamp(min=1e-2)) for norm, error in numbers), default=0.0)


def check(name: str, compiled: bool, times: bool) -> dict[str, Any]:
    """Train one model as described above, and return what the report shows."""
    entry = MODELS[name]
    loop, model = plain_loop(entry)
    losses, states = train(entry, loop)
    speed = dict(entry.speed) | ({"compile": {"backend": entry.backend, "cache": False}} if compiled else {})
    step = engine(entry, speed)
    found, found_states = train(entry, step)
    result = {
        "loss": difference(losses, found),
        "weights": difference(model.state_dict(), step.model.state_dict()),
        "random": states == found_states,
        "kind": step.summary().splitlines()[0],
        "warnings": [re.sub(r"/\S*/site-packages/", "", message) for message in step._warnings],
    }
    if max(result["loss"], result["weights"]) > LARGE:
        # Compare with the effect of rounding the weights once: normalizing few values multiplies such an error.
        loop, other = plain_loop(entry)
        perturb(other)
        rounded, _ = train(entry, loop)
        result["rounding"] = max(
            difference(losses, rounded), difference(model.state_dict(), other.state_dict())
        )
    if compiled and times:
        result["load"] = os.getloadavg()[0]
        result["times"] = step_times(entry, {"loop": loop, "step": step})
    if compiled and "one graph" not in result["kind"]:
        result["torch"] = torch_captures(entry)
    return result


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Change each weight by the rounding error of its precision."""
    for param in model.parameters():
        param.mul_(1 + torch.finfo(param.dtype).eps * torch.randn_like(param).sign())


def step_times(entry: Entry, steps: dict[str, Step]) -> dict[str, float]:
    """Return the median times in milliseconds of the steps, and of a loop with torch.compile(model), interleaved."""
    data = batches(entry, TIMED_STEPS)
    try:
        by_torch, _ = plain_loop(entry, {"backend": entry.backend})
        for batch in data[:4]:
            by_torch(batch)
        steps = {**steps, "torch": by_torch}
    except Exception as error:  # torch may not be able to compile a model that the step can train
        logging.info("torch.compile fails: %s", error)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for batch in data:
        for name, step in steps.items():
            start = perf_counter()
            step(batch)
            times[name].append(1e3 * (perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def torch_captures(entry: Entry) -> str:
    """Return 'one graph' if torch.compile(fullgraph=True) captures the model, or the first line of its error."""
    torch.compiler.reset()
    step, _ = plain_loop(entry, {"fullgraph": True, "backend": "eager"})
    try:
        for batch in batches(entry, 2):
            step(batch)
    except Exception as error:
        return str(error).strip().partition("\n")[0][:150]
    return "one graph"


# ---- all models --------------------------------------------------------------------------------------


def run(names: list[str], options: list[str], record: Callable[[str, dict[str, Any]], None]) -> None:
    """Check models in another process, and in a new one after each crash or timeout."""
    while names:
        command = [sys.executable, __file__, *options, "--worker", *names]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    record(names[0], json.loads(line))
                    names = names[1:]
        if process.returncode and names:
            record(names[0], {"error": f"the process ended with code {process.returncode}"})
            names = names[1:]


def work(names: list[str], compiled: bool, times: bool) -> None:
    """Check models in this process, and print a line of JSON for each."""
    warnings.filterwarnings("ignore")
    logging.getLogger("slipstream").setLevel(logging.CRITICAL)
    torch._logging.set_logs(dynamo=logging.CRITICAL, inductor=logging.CRITICAL)
    torch.set_num_threads(1)
    for name in names:
        signal.alarm(TIMEOUT)  # ends the process
        torch.compiler.reset()
        try:
            result = check(name, compiled, times)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:400]}
        print(json.dumps(result), flush=True)


def verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return "" if result is NOT_RUN else f"**{result['error'][:100]}**"
    error = max(result["loss"], result["weights"])
    rounding = f" (rounding: {result['rounding']:.0e})" if "rounding" in result else ""
    return f"{error:.0e}{rounding}" if error else "bitwise"


def rows(results: dict[str, Any]) -> list[list[str]]:
    found = []
    for name in MODELS:
        eager, compiled = results.get(name, {}).get("eager"), results.get(name, {}).get("compiled")
        if eager is None and compiled is None:
            continue
        eager, compiled = eager or NOT_RUN, compiled or NOT_RUN
        times = compiled.get("times", {})
        ratios = [
            f"{times['step'] / times[other]:.2f}" if other in times else "" for other in ("loop", "torch")
        ]
        random_states = "" if compiled.get("random", True) else " (other random state)"
        found.append([name, verdict(eager), kind(compiled), verdict(compiled) + random_states, *ratios])
    return found


def kind(result: dict[str, Any]) -> str:
    """Return what was compiled, with the reason if it is not one graph."""
    if "error" in result:
        return "failed" if result is not NOT_RUN else "not run"
    if "one graph" in result["kind"]:
        return "one graph"
    reason = " ".join(result["warnings"])[:220].replace("|", "/").replace("\n", " ")
    scope = "compiled model" if "compiled model" in result["kind"] else "eager"
    return f"{scope}: {reason}"


def is_missing(result: dict[str, Any] | None, times: bool) -> bool:
    """Return whether there is no result, or no step times although they are required."""
    return result is None or (times and not {"times", "error"}.intersection(result))


def report(out: Path, results: dict[str, Any]) -> None:
    header = ["model", "eager", "compiled as", "compiled", "step / loop", "step / torch.compile(model)"]
    table = rows(results)
    kinds = Counter(row[2].partition(":")[0] for row in table)
    text = NOTES.format(
        models=len(table),
        bitwise=sum(row[1] == "bitwise" for row in table),
        kinds=", ".join(f"{count} {name}" for name, count in kinds.items()),
    )
    text += text_table(header, table)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    write_result(
        out, "Real models", environment_info(LIBRARIES) | {"commit": commit}, text, {"results": results}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="train models whose names contain this text")
    parser.add_argument(
        "--missing", action="store_true", help="train only models without a result or step times"
    )
    parser.add_argument("--mode", choices=("eager", "compiled"), help="train only in this mode")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at a time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zoo.md")
    parser.add_argument("--quick", action="store_true", help="measure no step times")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.mode == "compiled", not args.quick)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data = args.out.with_suffix(".json")
    results = json.loads(data.read_text())["results"] if data.exists() else {}
    tasks = []
    for mode in [args.mode] if args.mode else ["eager", "compiled"]:
        names = [name for name in MODELS if args.only in name]
        times = mode == "compiled" and not args.quick
        if args.missing:
            names = [name for name in names if is_missing(results.get(name, {}).get(mode), times)]
        tasks += [(mode, names[start : start + CHUNK]) for start in range(0, len(names), CHUNK)]

    def check_chunk(task: tuple[str, list[str]]) -> None:
        def record(name: str, result: dict[str, Any]) -> None:
            results.setdefault(name, {})[task[0]] = result
            print(name, task[0], verdict(result), kind(result), result.get("times", ""), sep="; ", flush=True)
            report(args.out, results)

        run(task[1], ["--mode", task[0]] + ["--quick"] * args.quick, record)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(check_chunk, tasks))


if __name__ == "__main__":
    main()
