"""Print dataset statistics as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cli.tables import print_table

__all__ = ["print_statistics", "written_size"]

_MOST_SIZES = 8


def print_statistics(found: Mapping[str, Any]) -> None:
    """Print the statistics of one dataset."""
    print(f"{found['place']}: {found['samples']:,} samples of {found['dataset']}, {_sizes(found['sizes'])}")
    print_table(("id", "class", "share", "samples"), _rows(found), 80, right=("id", "share", "samples"))
    for line in _lines(found):
        print(line)
    print()


def written_size(size: float) -> str:
    """Return a size in bytes as a string with a unit, such as `25.3 MB`."""
    unit, larger = "B", ["TB", "GB", "MB", "kB"]
    while size >= 1000 and larger:
        size, unit = size / 1000, larger.pop()
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for entry in found["classes"]:
        yield str(entry["id"]), entry["name"], f"{entry['share']:.2%}", f"{entry['samples']:,}"
    if found["ignored"] is not None:
        yield "", "(ignored)", f"{found['ignored']:.2%}", ""


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    never = [entry["name"] for entry in found["classes"] if not entry["samples"]]
    if never and found["readable"]:
        yield f"Warning: classes without pixels: {', '.join(never)}"
    if found["mean"] is not None:
        after = ", after the transforms" if found["augmented"] else ""
        yield f"mean {_numbers(found['mean'])}  std {_numbers(found['std'])}  (per channel, 0 to 255{after})"
    if times := [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in found["seconds"].items()]:
        yield f"time per sample on one core of this machine: {', '.join(times)}"
    batch = found["batch"]
    if batch["bytes"] is not None:
        yield f"size of a batch of {batch['samples']}, as copied to the device: {written_size(batch['bytes'])}"


def _sizes(sizes: list[Mapping[str, int]]) -> str:
    if not sizes:
        return "none readable"
    texts = [f"{size['width']} x {size['height']}" for size in sizes[:_MOST_SIZES]]
    if len(sizes) == 1:
        return f"{texts[0]} pixels (width x height)"
    texts = [f"{text} ({size['samples']:,})" for text, size in zip(texts, sizes, strict=False)]
    more = f"; sizes not shown: {len(sizes) - _MOST_SIZES:,}" if len(sizes) > _MOST_SIZES else ""
    return f"pixels (width x height): {', '.join(texts)}{more}"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
