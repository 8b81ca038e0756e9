"""Update the table in docs/reliability.md that lists how many inputs the fuzzers have tried.

Run `python tests/faults/fuzz_results.py --page docs/reliability.md LOG...` with the outputs of the fuzzers. The last
line of each output contains the name of the fuzzer, the number of inputs and the number of findings. Fix all findings
first, because the table lists them as fixed. The date of a row is the date of its newest log.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

START, END = "<!-- fuzzers: start -->", "<!-- fuzzers: end -->"
WHAT = {
    "fuzz_config": "changed configurations",
    "fuzz_files": "damaged files, and overrides",
    "fuzz_checkpoint": "changed contents of checkpoints",
    "fuzz_atheris": "files and overrides, guided by code coverage",
}
_LINE = re.compile(r"(?m)^(fuzz_\w+): (\d+) inputs, (\d+) findings?$")
_ATHERIS = re.compile(r"(?m)^Done (\d+) runs in \d+ second")


class Result(NamedTuple):
    """The results of one fuzzer."""

    inputs: int = 0
    findings: int = 0
    date: str = ""


def summary(name: str, inputs: int, findings: int) -> str:
    """Return the last line of a fuzzer's output."""
    return f"{name}: {inputs} inputs, {findings} finding{'' if findings == 1 else 's'}"


def read(logs: list[Path]) -> dict[str, Result]:
    """Return the combined results of the logs, by fuzzer."""
    results: dict[str, Result] = {}
    for log in logs:
        text, date = log.read_text(), datetime.fromtimestamp(log.stat().st_mtime, UTC).date().isoformat()
        # libFuzzer prints its own last line, which is missing if it stopped at a finding.
        found = [
            *_LINE.findall(text),
            *(("fuzz_atheris", runs, 0) for runs in _ATHERIS.findall(text)),
        ]
        if not found:
            raise SystemExit(f"{log} is not the complete output of a fuzzer")
        for name, inputs, findings in found:
            old = results.get(name, Result())
            results[name] = Result(
                old.inputs + int(inputs), old.findings + int(findings), max(old.date, date)
            )
    return results


def markdown(results: dict[str, Result]) -> str:
    """Return the table."""
    lines = [
        "| fuzzer | inputs | tried | found, and fixed | not fixed | date |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, what in WHAT.items():
        if name in results:
            inputs, findings, date = results[name]
            lines.append(f"| `{name}` | {what} | {inputs} | {findings or 'none'} | none | {date} |")
    total = sum(result.inputs for result in results.values())
    found = sum(result.findings for result in results.values())
    return "\n".join([*lines, f"| all | | {total} | {found or 'none'} | none | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("logs", type=Path, nargs="+")
    options = parser.parse_args()
    text = options.page.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    options.page.write_text(f"{before}{START}\n{markdown(read(options.logs))}\n{END}{after}")


if __name__ == "__main__":
    main()
