"""Run the short tests with several versions of Python, torch and the dependencies, and write docs/versions.md.

    make versions
    make versions PAIRS="python3.12:2.12.0 python3.13:newest python3.11:2.13.0:lowest"

A pair consists of an interpreter and a version of torch (or `newest`). Append `:lowest` to install the lowest declared
version of every other dependency. Each pair is tested in a temporary virtual environment. pip's environment variables
can select an index of CPU builds of torch. If a pair cannot be installed, its row contains the reason. The exit code is
1 only if tests fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
START, END = "<!-- written by make versions -->\n", "<!-- end -->\n"
PAIRS = (
    "python3.11:2.11.0:lowest python3.11:2.13.0:lowest python3.12:2.11.0 python3.12:2.12.0 python3.13:newest"
)
EXTRAS = ("all", "metrics", "optimizers", "toml")
TOOLS = ("hypothesis", "pytest", "pytest-xdist")
MARKERS = "not (matrix or slow or npu or exhaustive)"


@dataclass(frozen=True)
class Pair:
    """An interpreter, a version of torch, and the versions of the other dependencies (`newest` or `lowest`)."""

    python: str
    torch: str = "newest"
    dependencies: str = "newest"


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    python: str
    torch: str
    dependencies: str
    passed: int | str = "-"
    failed: int | str = "-"
    skipped: int | str = "-"
    date: str = ""
    remark: str = ""


def declared_requirements(project: Mapping[str, Any], extras: tuple[str, ...] = EXTRAS) -> Iterator[str]:
    """Yield the requirements of a `[project]` table except torch, and those of its extras."""
    yield from (each for each in project["dependencies"] if not each.startswith("torch>"))
    for extra in extras:
        for each in project["optional-dependencies"][extra]:
            if inner := re.fullmatch(rf"{project['name']}\[(.+)\]", each):
                yield from declared_requirements({**project, "dependencies": []}, tuple(inner[1].split(",")))
            else:
                yield each


def requirements(project: Mapping[str, Any], pair: Pair) -> list[str]:
    """Return the requirements that pip installs for a pair, except the package itself."""
    declared = list(declared_requirements(project))
    if pair.dependencies == "lowest":
        declared = [each.replace(">=", "==") for each in declared]
    return ["torch" if pair.torch == "newest" else f"torch=={pair.torch}", *declared, *TOOLS]


def count_outcomes(report: str) -> tuple[int, int, int, str]:
    """Return the numbers of passed, failed and skipped tests in a JUnit report, and the first three failed tests."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = ", ".join(f"`{case.get('classname')}.{case.get('name')}`" for case in failed[:3])
    return len(cases) - len(failed) - skipped, len(failed), skipped, names


def render(page: str, rows: list[Row]) -> str:
    """Return the page with the rows between its two markers."""
    titles = ("Python", "torch", "dependencies", "passed", "failed", "skipped", "date", "remark")
    lines = [titles, ("---",) * len(titles), *map(astuple, rows)]
    table = "".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |\n" for line in lines)
    before, rest = page.split(START)
    return f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}"


def run_tests(pair: Pair) -> Row:
    """Install a pair, run the tests, and return its row."""
    today = date.today().isoformat()
    row = Row(pair.python, pair.torch, pair.dependencies, date=today)
    with TemporaryDirectory(prefix="slipstream-versions-") as folder:
        python, report = Path(folder, "venv", "bin", "python"), Path(folder, "report.xml")
        if reason := _install(pair, python):
            return replace(row, remark=f"not installed: {reason}")
        command = "import platform, torch; print(platform.python_version(), torch.__version__)"
        versions = subprocess.run(
            [python, "-c", command], capture_output=True, text=True, check=True
        ).stdout.split()
        row = replace(row, python=versions[0], torch=versions[1])
        options = ["-n", "2", "--dist", "loadscope", "-rs", "-m", MARKERS, f"--junitxml={report}"]
        exit_code = subprocess.run([python, "-m", "pytest", *options], cwd=ROOT).returncode
        if not report.exists():
            return replace(row, failed=1, remark=f"pytest exited with code {exit_code} and wrote no report")
        passed, failed, skipped, remark = count_outcomes(report.read_text())
    return replace(row, passed=passed, failed=failed, skipped=skipped, remark=remark)


def _install(pair: Pair, python: Path) -> str | None:
    """Create the virtual environment of a pair; return the reason if this is not possible."""
    if shutil.which(pair.python) is None:
        return f"{pair.python} was not found"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = [python, "-m", "pip", "install", "--quiet"]
    for command in (
        [pair.python, "-m", "venv", python.parent.parent],
        [*pip, *requirements(project, pair)],
        [*pip, "--no-deps", "--editable", ROOT],
    ):
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            lines = process.stderr.splitlines() or [f"exit code {process.returncode}"]
            errors = [line for line in lines if line.startswith("ERROR: ")]
            reason = errors[-1].removeprefix("ERROR: ") if errors else lines[0]
            return re.sub(r"\S*://\S*", "(address)", reason)
    return None


def main(pairs: list[str]) -> int:
    """Test the pairs, write the page, and return the exit code."""
    rows = [run_tests(Pair(*pair.split(":"))) for pair in pairs or PAIRS.split()]
    PAGE.write_text(render(PAGE.read_text(), rows))
    print(*rows, sep="\n")
    return int(any(row.failed not in ("-", 0) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
