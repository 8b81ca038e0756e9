"""Code shared by the benchmarks: machine information, tables and result files."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from slipstream.cores import cpu_name


def environment_info(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Return the command, date, machine and package versions. `load` is the 1-minute load average."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in packages},
    }


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table with text in the first column and numbers in the others."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table with text in all columns."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write_result(out: Path, title: str, environment: dict[str, Any], text: str, data: Any) -> None:
    """Write the report to `out` (`.md`), and all measurements next to it (`.json`)."""
    lines = "\n".join(f"- {name}: {value}" for name, value in environment.items())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(f"# {title}\n\n{lines}\n\n{text}\n", encoding="utf-8")
    document = json.dumps({**environment, **data}, indent=1)
    out.with_suffix(".json").write_text(document + "\n", encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
