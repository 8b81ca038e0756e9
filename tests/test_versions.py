"""Tests of the script that `make versions` runs: requirements of a pair, counts from a test report, and the table."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / ".ci" / "versions.py"
spec = importlib.util.spec_from_file_location("ci_versions", FILE)
versions = sys.modules["ci_versions"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(versions)
Pair, Row = versions.Pair, versions.Row

PROJECT = {
    "name": "own",
    "dependencies": ["torch>=2.11", "numpy>=1.26"],
    "optional-dependencies": {
        "all": ["own[images,plots]"],
        "images": ["pillow>=10.3"],
        "plots": ["matplotlib>=3.8"],
        "metrics": ["torchmetrics>=1.4.1"],
        "optimizers": ["pytorch-optimizer>=4.1"],
        "toml": ["tomli-w>=1.0"],
        "wandb": ["wandb>=0.17"],
    },
}
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two[x]"><failure message="no">lines</failure></testcase>
<testcase classname="tests.b" name="three"><error message="setup"/></testcase>
<testcase classname="tests.b" name="four"><skipped message="needs a GPU"/></testcase>
<testcase classname="tests.b" name="five"/>
</testsuite></testsuites>"""


def test_lowest_versions_match_the_declared_requirements():
    assert versions.requirements(PROJECT, Pair("python3.11", "2.11.0", "lowest")) == [
        "torch==2.11.0",
        "numpy==1.26",
        "pillow==10.3",
        "matplotlib==3.8",
        "torchmetrics==1.4.1",
        "pytorch-optimizer==4.1",
        "tomli-w==1.0",
        *versions.TOOLS,
    ]


def test_pip_selects_the_newest_versions():
    found = versions.requirements(PROJECT, Pair("python3.13"))
    assert found[:3] == ["torch", "numpy>=1.26", "pillow>=10.3"]


def test_outcomes_in_a_report_are_counted():
    assert versions.count_outcomes(REPORT) == (2, 2, 1, "`tests.a.two[x]`, `tests.b.three`")


def test_table_is_replaced_between_the_markers():
    page = f"before\n{versions.START}old\n{versions.END}after\n"
    rows = [
        Row("3.11.7", "2.13.0", "lowest", 9, 0, 1, "2026-11-22"),
        Row("python3.9", "newest", "newest", remark="a|b"),
    ]
    found = versions.render(page, rows)
    assert found.startswith(f"before\n{versions.START}\n| Python | torch |")
    assert "\n| 3.11.7 | 2.13.0 | lowest | 9 | 0 | 1 | 2026-11-22 |  |\n" in found
    assert "\n| python3.9 | newest | newest | - | - | - |  | a/b |\n" in found
    assert found.endswith(f"{versions.END}after\n")
    assert versions.render(found, rows) == found


def test_page_contains_the_markers():
    assert versions.render(versions.PAGE.read_text(), [])


class Done:
    def __init__(self, returncode=0, stdout="", stderr=""):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def page(tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    page.write_text(versions.START + versions.END)
    monkeypatch.setattr(versions, "PAGE", page)
    return page


def test_missing_interpreter_or_wheel_has_a_row_and_is_not_a_failure(page, monkeypatch):
    def run(command, **_):
        if command[0] == "python3.12":
            return Done(127, stderr="python3.12: command not found\nit exists elsewhere\n")
        if "pip" not in command:
            return Done()
        return Done(
            1, stderr="WARNING: x\nERROR: No matching distribution found for torch==9 at https://a.b/c\n"
        )

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(versions.shutil, "which", lambda name: None if name == "python9" else name)
    assert versions.main(["python9", "python3.12", "python3.11:9"]) == 0
    assert "| python9 | newest | newest | - | - | - |" in page.read_text()
    assert "not installed: python9 was not found |" in page.read_text()
    assert "not installed: python3.12: command not found |" in page.read_text()
    assert "not installed: No matching distribution found for torch==9 at (address) |" in page.read_text()


@pytest.mark.parametrize(
    ("report", "code", "cells"),
    [
        (REPORT, 1, "| 3.11.7 | 2.13.0+cpu | lowest | 2 | 2 | 1 |"),
        ("<testsuites><testcase/></testsuites>", 0, "| 3.11.7 | 2.13.0+cpu | lowest | 1 | 0 | 0 |"),
        (None, 1, "| 3.11.7 | 2.13.0+cpu | lowest | - | 1 | - |"),
    ],
)
def test_exit_code_is_1_only_if_tests_fail(report, code, cells, page, monkeypatch):
    def run(command, **_):
        for option in map(str, command):
            if option.startswith("--junitxml=") and report is not None:
                Path(option.removeprefix("--junitxml=")).write_text(report)
        return Done(stdout="3.11.7 2.13.0+cpu\n")

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(versions.shutil, "which", lambda name: name)
    assert versions.main(["python3.11:2.13.0:lowest"]) == code
    assert cells in page.read_text()
