"""Print dataset statistics as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cli.tables import print_table

__all__ = ["format_size", "print_statistics"]

_MAX_SIZES = 8


def print_statistics(statistics: Mapping[str, Any]) -> None:
    """Print the statistics of one dataset."""
    count = statistics["samples"]
    samples = f"{count:,} sample{'s' * (count != 1)} of {statistics['dataset']}"
    if (readable := statistics["readable"]) != count:
        samples += f" ({readable:,} readable)"
    print(f"{statistics['place']}: {samples}, {_sizes(statistics['sizes'])}")
    print_table(("id", "class", "share", "samples"), _rows(statistics), 80, right=("id", "share", "samples"))
    for line in _lines(statistics):
        print(line)
    print()


def format_size(size: float) -> str:
    """Return a size in bytes as a string with a unit, such as `25.3 MB`."""
    unit, larger = "B", ["TB", "GB", "MB", "kB"]
    while size >= 1000 and larger:
        size, unit = size / 1000, larger.pop()
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _rows(statistics: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for entry in statistics["classes"]:
        yield str(entry["id"]), entry["name"], f"{entry['share']:.2%}", f"{entry['samples']:,}"
    if statistics["ignored"] is not None:
        yield "", "(ignored)", f"{statistics['ignored']:.2%}", ""


def _lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    unused = [entry["name"] for entry in statistics["classes"] if not entry["samples"]]
    if unused and statistics["readable"]:
        yield f"Warning: classes without pixels: {', '.join(unused)}"
    if statistics["mean"] is not None:
        after = ", after the transforms" if statistics["augmented"] else ""
        yield f"mean {_numbers(statistics['mean'])}  std {_numbers(statistics['std'])}  (per channel, 0 to 255{after})"
    if times := [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in statistics["seconds"].items()]:
        yield f"time per sample on one core of this machine: {', '.join(times)}"
    batch = statistics["batch"]
    if batch["bytes"] is not None:
        yield f"size of a batch of {batch['samples']}, as copied to the device: {format_size(batch['bytes'])}"


def _sizes(sizes: list[Mapping[str, int]]) -> str:
    if not sizes:
        return "none readable"
    texts = [f"{size['width']} x {size['height']}" for size in sizes[:_MAX_SIZES]]
    if len(sizes) == 1:
        return f"{texts[0]} pixels (width x height)"
    texts = [f"{text} ({size['samples']:,})" for text, size in zip(texts, sizes, strict=False)]
    more = f"; sizes not shown: {len(sizes) - _MAX_SIZES:,}" if len(sizes) > _MAX_SIZES else ""
    return f"pixels (width x height): {', '.join(texts)}{more}"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
