"""Tests of `slipstream runs` and `slipstream report` with malformed run folders."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.report import read_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))

from records import record

from slipstream.report import write_report

LINE = b'{"step": 7, "iter": 7, "loss": 0.5}\n'


def logged(folder, log=b"", scalars=b""):
    (folder / "vis_data").mkdir(parents=True)
    (folder / f"{folder.name}.log").write_bytes(log)
    (folder / "vis_data" / "scalars.json").write_bytes(scalars + LINE)


def reported(folder, text=None, **changes):
    folder.mkdir(parents=True)
    write_report(record(), folder)
    path = folder / "report.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_bytes(json.dumps({**data, **changes}).encode() if text is None else text)


def other(folder, name, make):
    """Write a run and replace one of its files."""
    logged(folder)
    path = folder / name.replace("NAME", folder.name)
    path.unlink(missing_ok=True)
    make(path)


def lists(**changes):
    names = ("x", "mean", "low", "high", "count", "bad", "newest")
    return {"train/loss": {**{name: [1, 2] for name in names}, **changes}}


READABLE = {
    "20260230_101010": lambda run: logged(run, b"2026/02/30 10:10:10 - INFO - a date that does not exist\n"),
    "deep": lambda run: logged(run, scalars=b'{"iter": 9, "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n"),
    "huge": lambda run: logged(run, scalars=b'{"iter": 9, "loss": 1' + b"0" * 400 + b"}\n"),
    "longer": lambda run: logged(run, scalars=b'{"iter": 9, "loss": 1' + b"0" * 5000 + b"}\n"),
    "latin": lambda run: logged(
        run, "2026/01/02 03:04:05 - INFO - é".encode("latin-1"), b'\xff{"iter": 9}\n'
    ),
    "half": lambda run: logged(run, b"2026/01/02 03:0", b'{"iter": 9, "loss": 1\n'),
    os.fsdecode(b"name\xff\x1b[31m"): logged,
}
UNREADABLE = {
    "folder": (lambda run: other(run, "report.json", Path.mkdir), "report.json is a folder"),
    "log folder": (lambda run: other(run, "NAME.log", Path.mkdir), "log folder.log is a folder"),
    "scalars folder": (lambda run: other(run, "vis_data/scalars.json", Path.mkdir), "scalars.json is a folder"),
    "pipe": (lambda run: other(run, "vis_data/scalars.json", os.mkfifo), "scalars.json is not a file"),
    "loop": (lambda run: other(run, "report.json", lambda path: path.symlink_to(path.name)), "is not a file"),
    "big": (lambda run: reported(run, iteration=10**400), "an integer has 401 digits"),
    "big setting": (lambda run: reported(run, settings={"num_workers": 10**400}), "an integer has 401 digits"),
    "big float": (lambda run: reported(run, b'{"format": 1, "name": "a", "seconds": 1e999}'), "1e999 is too large"),
    "nested": (lambda run: reported(run, b"[" * 10**5), "nested too deeply"),
    "bytes": (lambda run: reported(run, b'{"format": 1, "name": "\xff"}'), "can't decode byte 0xff"),
    "far": (lambda run: reported(run, curves=lists(x=[1e18, 2])), "integers between 0 and"),
    "negative": (lambda run: reported(run, curves=lists(count=[-1, 1])), "integers between 0 and"),
}  # fmt: skip


@pytest.fixture
def good(tmp_path):
    """Return a folder with a run that can be read."""
    reported(tmp_path / "good")
    return tmp_path


def output(capsys, *arguments, status=0):
    assert main(list(map(str, arguments))) == status
    read = capsys.readouterr()
    read.out.encode()  # fails if the text contains a lone surrogate, which a terminal cannot display
    return read.out + read.err


@pytest.mark.parametrize("name", READABLE, ids=ascii)
def test_strange_lines_and_names_do_not_hide_the_rest(good, capsys, name):
    READABLE[name](good / name)
    text = output(capsys, "runs", good)
    assert " finished " in text
    assert " incomplete " in text
    assert "\x1b[31m" not in text
    made = read_run(good / name)
    assert (made.iteration, made.curves["train/loss"].last()) == (7, 0.5)
    output(capsys, "report", good / name)
    output(capsys, "report", good / name, good / "good", "--out", good / "c.html", "--csv", good / "c.csv")


@pytest.mark.parametrize("name", UNREADABLE)
def test_row_of_an_unreadable_run_contains_the_reason(good, capsys, name):
    make, reason = UNREADABLE[name]
    make(good / name)
    text = output(capsys, "runs", good)
    assert " finished " in text
    assert " unreadable " in text
    assert reason in text
    assert reason in output(capsys, "report", good / name, status=1)


def test_folder_that_vanishes_raises_a_one_line_error(good, capsys, monkeypatch):
    def vanish(path):
        shutil.rmtree(good / "good")
        return os.scandir(path)

    monkeypatch.setattr(Path, "iterdir", lambda path: vanish(good / "good"))
    assert "cannot read" in output(capsys, "report", good, status=2)
