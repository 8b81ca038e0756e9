"""Write the measured figures in README.md and docs/ from the JSON files in benchmarks/results/.

    python benchmarks/figures.py            # rewrite the regions
    python benchmarks/figures.py --check    # exit with status 1 if a region differs from the results

A region starts with `<!-- figures: NAME -->` and ends with `<!-- end -->`. NAME selects a function in
REGIONS. Except for `readme`, which makes a selection, each function reports all cases of its benchmark, including those
in which Slipstream is slower.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from report import table, text_table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MARK = re.compile(r"<!-- figures: ([\w ]*) -->\n(.*?)<!-- end -->", re.DOTALL)
GRAPH = "Slipstream, one graph"
GPU_COMPILED = "loop, torch.compile(model), fused SGD"
GPU_RESULTS = (("gpu", "pp_lite_t_seg75"), ("gpu_segformer_b0", "segformer_b0"))
"""Results of benchmarks/gpu.py, and the network of each result in which Slipstream was measured."""
TUNED = ("tune", "tune_networks", "tune_ddrnet")
"""Results of benchmarks/tune.py. A later result for a recipe replaces an earlier one."""
NAMES = {
    "MLP": "MLP",
    "conv net": "small conv net",
    "pp_lite_t_seg75": "PP-LiteSeg-T",
    "stdc1_seg75": "STDC1-Seg",
    "regseg48": "RegSeg-48",
    "segformer_b0": "SegFormer-B0",
    "ddrnet_23_slim": "DDRNet-23-slim",
}
SEGMENTATION_LOSSES = ("segmentation_losses", "segmentation_losses_crops", "segmentation_losses_compiled")
LOADERS = {"own data set": "custom dataset"}
"""Maps the labels of data loaders in older results to their current names."""
TWO_PROCESSES = "Tiny networks in two gloo processes (the loop uses DDP)"
DECODERS = {
    "PIL": "Pillow, one transform after another",
    "albumentations": "albumentations, OpenCV",
    "slipstream, Pillow": "Slipstream, Pillow's decoder",
    "slipstream, cached": "Slipstream, cached",
}


@cache
def result(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def machine(name: str, threads: int | None = None) -> str:
    """Return the processor, number of threads and date of a result. `threads=0` omits the number of threads."""
    info = result(name)
    threads = info["threads"] if threads is None else threads
    cpu = info["cpu"].replace("(R)", "").removesuffix(" Processor")
    thread_count = f"{threads} thread{'s' * (threads > 1)}, " if threads else ""
    return f"{cpu}, {info['cores']} cores, {thread_count}{info['date'][:10]}"


def rounds_note(values: Sequence[Any]) -> str:
    return f"medians of {len(values)} interleaved rounds"


def round_ratios(ours: Iterable[float], other: Iterable[float]) -> list[float]:
    """Return the ratio of the two times in each round."""
    return [a / b for a, b in zip(ours, other, strict=True)]


def ratio(ours: Iterable[float], other: Iterable[float], digits: int = 2) -> str:
    """Return the median, minimum and maximum of the per-round ratios."""
    ratios = round_ratios(ours, other)
    return f"{median(ratios):.{digits}f} ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})"


def added_time(ours: Iterable[float], other: Iterable[float]) -> float:
    """Return the median of the per-round differences."""
    return median(a - b for a, b in zip(ours, other, strict=True))


def source(name: str, script: str = "") -> str:
    """Return a link from README.md to a result, with its machine and date."""
    threads = 1 if name == "data" else None
    return f"[`{script or name}.py`](benchmarks/results/{name}.md), {machine(name, threads)}"


def loader_label(case: dict[str, Any]) -> str:
    return LOADERS.get(case["loader"], case["loader"])


def overhead_case(network: str, loader: str) -> dict[str, list[float]]:
    cases = result("overhead")["cases"]
    return next(c["milliseconds"] for c in cases if (c["network"], loader_label(c)) == (network, loader))


def readme() -> str:
    rows: list[list[str]] = []
    for network, loader in (
        ("MLP", "TensorDataset"),
        ("MLP", "custom dataset"),
        ("conv net", "custom dataset"),
    ):
        times = overhead_case(network, loader)
        loop = times["loop"]
        differences = {name: f"{added_time(values, loop):+.3f}" for name, values in times.items()}
        others = ", ".join(f"{name} {differences[name]}" for name in ("Accelerate", "MMEngine", "Lightning"))
        rows.append([f"time added to a training step, {NAMES[network]}, {loader}",
                     f"a hand-written loop ({median(loop):.3f} ms)",
                     f"`accelerate` {differences['Slipstream, accelerate']} ms, Runner {differences['Slipstream']}; "
                     f"{others}", source("overhead")])  # fmt: skip
    graphs = [
        (
            "one_graph_tiny",
            "Tiny networks",
            "MLP",
            "loop, torch.compile(model)",
            "`torch.compile(model)` in a loop",
        )
    ]
    for network in result("one_graph")["milliseconds"]["The recipes' networks"]:
        graphs.append(("one_graph", "The recipes' networks", network, "loop", "a hand-written loop"))
    for name, part, network, other, label in graphs:
        times = result(name)["milliseconds"][part][network]
        rows.append([f"step with `compile=True`, {NAMES[network]}", label,
                     f"{ratio(times[GRAPH], times[other])} times the step time",
                     source(name, "one_graph")])  # fmt: skip
    for name, network in GPU_RESULTS:
        info = result(name)
        contenders = info["networks"][network]["contenders"]
        rows.append([f"step with `compile=True` and bf16 on a GPU, {NAMES[network]}",
                     "`torch.compile(model)` and fused SGD in a loop",
                     f"{ratio(contenders[GRAPH]['seconds'], contenders[GPU_COMPILED]['seconds'])} times the step time",
                     f"[`gpu.py`](benchmarks/results/{name}.md), {info['device']}, {info['date'][:10]}"])  # fmt: skip
    rounds = result("data")["rounds"]
    pillow = f"Pillow ({median(1 / r['PIL']['all'] for r in rounds):.1f} images/s)"
    description = (
        "images per second on one core, 2048x1024 PNG images and masks, decoded, augmented and normalized"
    )
    for label, decoder in (
        (description, "slipstream, Pillow"),
        ("the same, from the decode-once cache", "slipstream, cached"),
    ):
        speed = median(1 / r[decoder]["all"] for r in rounds)
        rows.append([label, pillow, f"{speed:.1f}", source("data")])
    header = ["what", "compared with", "result", "script in `benchmarks/`, machine, date"]
    return f"{text_table(header, rows)}\n\n{overhead_note()}"


def overhead_note() -> str:
    """Return a note about overhead that is not included in the results of overhead.py."""
    if "Slipstream, Trainer" in result("overhead")["cases"][0]["milliseconds"]:  # with the default hooks
        return ""
    return (
        "These figures were measured before run reports were added. The timer that reports use adds about "
        f"{median(result('report_overhead')['timer_us']):.0f} µs per step ({machine('report_overhead')})."
    )


def overhead() -> str:
    rows = []
    for case in result("overhead")["cases"]:
        times = case["milliseconds"]
        cells = [f"{median(times['loop']):.3f}"]
        own = [name for name in times if name.startswith("Slipstream")]
        for name in (*own, "Accelerate", "MMEngine", "Lightning"):
            cells.append(f"{median(times[name]):.3f} ({added_time(times[name], times['loop']):+.3f})")
        rows.append([f"{NAMES[case['network']]}, {loader_label(case)}", *cells])
    info = result("overhead")
    versions = [
        f"{name} {info[name.lower()].rpartition('.')[0]}" for name in ("Accelerate", "MMEngine", "Lightning")
    ]
    header = ["milliseconds per step", "hand-written loop", *own, *versions]
    n = f"{rounds_note(times['loop'])} of {info['steps']:,} steps"
    return f"{table(header, rows)}\n\n{machine('overhead')}; {n}; batch size {info['batch size']}. {overhead_note()}"


def one_graph_tiny() -> str:
    rows = []
    for part, suffix in (("Tiny networks", ""), (TWO_PROCESSES, ", two gloo processes (DDP in the loops)")):
        for network, times in result("one_graph_tiny")["milliseconds"][part].items():
            ratios = [ratio(times[GRAPH], times[other]) for other in ("loop", "loop, torch.compile(model)")]
            rows.append([NAMES[network] + suffix, *ratios])
    header = [
        "time with one graph relative to:",
        "the hand-written loop",
        "the loop with `torch.compile(model)`",
    ]
    return f"{table(header, rows)}\n\n{machine('one_graph_tiny')}; {rounds_note(times[GRAPH])} (minimum to maximum)."


def one_graph() -> str:
    rows = []
    for network, times in result("one_graph")["milliseconds"]["The recipes' networks"].items():
        rows.append(
            [
                NAMES[network],
                *(ratio(times[GRAPH], times[other]) for other in ("loop", "loop, channels_last")),
            ]
        )
    header = ["time with one graph relative to:", "the hand-written loop", "the loop in channels_last"]
    info = result("one_graph")
    crop = info["crop size for the recipe networks"]
    clock = {"cpu": "CPU time", "wall": "wall time"}[info["clock"]]
    return (
        f"{table(header, rows)}\n\n{clock}; crops of {crop}x{crop}; {machine('one_graph')}; "
        f"{rounds_note(times[GRAPH])} (minimum to maximum)."
    )


def gpu() -> str:
    rows = []
    for name, network in GPU_RESULTS:
        contenders = result(name)["networks"][network]["contenders"]
        ours, loop, compiled = (contenders[key] for key in (GRAPH, "eager loop", GPU_COMPILED))
        ratios = [ratio(ours["seconds"], other["seconds"]) for other in (loop, compiled)]
        gib = [f"{figures['peak bytes'] / 2**30:.2f}" for figures in (loop, compiled, ours)]
        rows.append([NAMES[network], *ratios, *gib])
    header = [
        "time with one graph relative to:",
        "the eager loop",
        "the loop with `torch.compile(model)` and fused SGD",
        "peak GiB: eager loop",
        "`torch.compile(model)`",
        "one graph",
    ]
    info = result(name)
    return (
        f"{table(header, rows)}\n\n{info['device']}, torch {info['torch']}, {info['date'][:10]}; "
        f"{rounds_note(ours['seconds'])} (minimum to maximum)."
    )


def host_time() -> str:
    rows = []
    for name, times in result("host_time")["microseconds"].items():
        wall = {contender: [pair[0] for pair in values] for contender, values in times.items()}
        rows.append([name, *(f"{median(wall[c]):.0f}" for c in ("loop", GRAPH, "jax.jit")),
                     *(ratio(wall[GRAPH], wall[c]) for c in ("loop", "jax.jit"))])  # fmt: skip
    header = [
        "microseconds per step",
        "hand-written loop",
        "one graph",
        "`jax.jit`",
        "one graph / loop",
        "one graph / `jax.jit`",
    ]
    return (
        f"{table(header, rows)}\n\n{machine('host_time')}; {rounds_note(wall[GRAPH])} (minimum to maximum)."
    )


def data() -> str:
    rounds = result("data")["rounds"]
    rows = []
    for name, label in DECODERS.items():
        cells = [label]
        for part in ("worker", "all"):
            speed = median(1 / r[name][part] for r in rounds)
            relative = median(r["PIL"]["all"] / r[name][part] for r in rounds)
            cells.append(f"{speed:.1f} ({relative:.1f}x)")
        rows.append([*cells, f"{median(r[name]['adds_mb'] for r in rounds):.0f} MB"])
    info = result("data")
    header = [
        "images per second on one core",
        "worker only (color transforms and normalization run on the device)",
        "with color transforms and normalization on the same core",
        "additional memory",
    ]
    versions = ", ".join(
        f"{name} {info[name]}" for name in ("pillow", "albumentations", "opencv-python-headless")
    )
    return f"{table(header, rows)}\n\n{machine('data', threads=1)}; {rounds_note(rounds)}; {versions}."


def fused() -> str:
    rows = [
        [name, *(f"{median(times[kind]):.1f}" for kind in ("loop", "foreach", "fused")),
         *(ratio(times[kind], times["loop"]) for kind in ("foreach", "fused"))]
        for name, times in result("fused")["times_ms"].items()
    ]  # fmt: skip
    header = ["ms per optimizer step", "loop", "`foreach=True`", "fused", "foreach / loop", "fused / loop"]
    n = len(next(iter(result("fused")["times_ms"].values()))["loop"])
    return (
        f"{table(header, rows)}\n\n{machine('fused')}; medians of {n} interleaved steps (minimum to maximum)."
    )


def sync_bn() -> str:
    two, one = (result("sync_bn")[f"{count} per pass"] for count in ("two", "one"))
    rows = [
        ["two per pass", f"{median(two):.1f}", ""],
        ["one per pass", f"{median(one):.1f}", ratio(one, two)],
    ]
    header = ["collectives", "ms per step", "relative to two per pass"]
    return f"{table(header, rows)}\n\n{machine('sync_bn')}; {rounds_note(one)} (minimum to maximum)."


def compile_cache() -> str:
    rows = [
        [f"{scope}, {start}", f"{median(r['seconds'] for r in runs):.1f}", runs[0]["found"]]
        for scope, starts in result("compile_cache")["starts"].items()
        for start, runs in starts.items()
    ]
    n = result("compile_cache")["n (rounds)"]
    header = ["start of a fresh process", "seconds", "code found in the cache"]
    return f"{table(header, rows)}\n\n{machine('compile_cache')}; n = {n}."


def checkpoint() -> str:
    rows = []
    for name, times in result("checkpoint")["save"].items():
        cells = (f"{median(times[key]):.2f}" for key in ("synchronous", "stall", "background"))
        rows.append([name, *cells, ratio(times["stall"], times["synchronous"])])
    header = [
        "seconds to save a checkpoint",
        "synchronous",
        "training paused",
        "writing in the background",
        "paused / synchronous",
    ]
    load = result("checkpoint")["load"]
    load_ratio = ratio(load["verified"], load["torch.load"])
    n = len(load["verified"])
    return (
        f"{table(header, rows)}\n\nLoading with verification takes {load_ratio} times as long as `torch.load`. "
        f"{machine('checkpoint')}; medians of {n} rounds (minimum to maximum)."
    )


def openmmlab() -> str:
    from openmmlab import summary

    info = result("openmmlab")
    loads = [case["load"] for case in info["cases"] if "load" in case]
    load = f"load average before each case: {min(loads)} to {max(loads)}" if loads else "no case was run"
    commands = " and ".join(dict.fromkeys(f"`{case['command']}`" for case in info["cases"]))
    text = (
        f"{summary(info['cases'])}\n\n{commands}, MMEngine {info['mmengine']}, torch {info['torch']}; "
        f"{machine('openmmlab')}; {load}."
    )
    phases = [phase for case in info["cases"] for phase in case.get("phases", ())]
    counts = {len(times) for phase in phases for times in phase["seconds"].values()} - {0}
    if not counts:
        return text
    n = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return (
        f"{text} Times are medians of {n} interleaved rounds. In parentheses: the time relative to MMEngine's in the "
        "same round (median; minimum to maximum)."
    )


def report_overhead() -> str:
    from report_overhead import summary

    info = result("report_overhead")
    n = info["n (rounds)"]
    return (
        f"{summary(info)}\n\n`{info['recipe']}`; {machine('report_overhead')}; medians of {n} measurements."
    )


def segmentation_losses() -> str:
    from segmentation_losses import describe

    parts = []
    for name in SEGMENTATION_LOSSES:
        info = result(name)
        text = describe(info["results"], info.get("crop divisor", 1))
        step, n = info["step"].capitalize(), info["n (rounds)"]
        parts.append(f"{text}\n\n{step}, batch size 2; {machine(name)}; medians of {n} rounds.")
    return "\n\n".join(parts)


def tuned_plans() -> str:
    rows = []
    latest = {case["recipe"]: (case, name) for name in TUNED for case in result(name)["cases"]}
    for case, name in latest.values():
        ratios = {row["name"]: row["ratio"] for row in case["compared"] if row["ratio"] is not None}
        single_options = {key: ratios[key] for key in ratios if key not in ("baseline", 'speed="auto"')}
        fastest = min(single_options, key=lambda key: single_options[key]["ratio"], default=None)
        plan = " + ".join(case["adopted"]) or "no option"
        cells = [_speed(ratios.get(key)) for key in ("baseline", 'speed="auto"')]
        fastest_cell = f"{fastest}: {_speed(single_options[fastest])}" if fastest else ""
        rows.append(
            [case["recipe"], plan, f"{case['search seconds']:.0f}", *cells, fastest_cell, machine(name)]
        )
    header = [
        "recipe",
        "plan",
        "search (s)",
        "plan / baseline",
        'plan / `speed="auto"`',
        "plan / fastest single option",
        "machine, date",
    ]
    return (
        f"{text_table(header, rows)}\n\nRatios of speeds (medians over interleaved rounds, with intervals); "
        "a ratio above 1 means that the plan is faster."
    )


def _speed(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


FUNCTIONS = (readme, overhead, one_graph_tiny, one_graph, gpu, host_time, data, fused,
             sync_bn, compile_cache, checkpoint, segmentation_losses,
             openmmlab, report_overhead, tuned_plans)  # fmt: skip
REGIONS: dict[str, Callable[[], str]] = {f.__name__.replace("_", " "): f for f in FUNCTIONS}


def pages() -> list[Path]:
    """Return the pages that contain a region."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if "<!-- figures:" in page.read_text(encoding="utf-8")]


def render(text: str, page: str) -> str:
    """Return a page with its regions regenerated.

    Raises:
        ValueError: if a region has an unknown name or no end marker.
    """
    if len(MARK.findall(text)) != text.count("<!-- figures:"):
        raise ValueError(
            f"A region in {page} has no end marker. Add <!-- end --> before the next region starts."
        )

    def write(match: re.Match[str]) -> str:
        if match[1] not in REGIONS:
            raise ValueError(
                f"{page} contains the unknown region {match[1]!r}. Valid regions: {', '.join(REGIONS)}."
            )
        return f"<!-- figures: {match[1]} -->\n\n{REGIONS[match[1]]()}\n\n<!-- end -->"

    return MARK.sub(write, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="do not change files; print the differences")
    args = parser.parse_args()
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    new = {page: render(text, page.name) for page, text in texts.items()}
    changed = [page for page in texts if new[page] != texts[page]]
    for page in changed:
        if args.check:
            lines = (texts[page].splitlines(), new[page].splitlines())
            print("\n".join(difflib.unified_diff(*lines, str(page), "results", lineterm="")))
        else:
            page.write_text(new[page], encoding="utf-8")
    return int(bool(changed) and args.check)


if __name__ == "__main__":
    sys.exit(main())
