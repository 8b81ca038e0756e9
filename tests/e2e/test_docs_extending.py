"""The page on extending: its file of an option is the one in the package, its table names the whole protocol."""

import re
from pathlib import Path

from doc_pages import blocks, text_of

from slipstream.speed import gradient_centralization
from slipstream.step.parts import StepPart

PAGE = "docs/extending.md"
TEXT = text_of(PAGE)


def test_the_whole_file_is_that_of_the_package():
    source = Path(gradient_centralization.__file__).read_text(encoding="utf-8")
    assert source in [block.text for block in blocks("python", PAGE)]


def test_the_line_is_that_of_the_plan():
    (line,) = [block.text for block in blocks("text", PAGE)]
    plan = Path(gradient_centralization.__file__).with_name("plan.py").read_text(encoding="utf-8")
    assert re.sub(r"\s", "", line) in re.sub(r"\s", "", plan)


def test_the_table_names_the_whole_protocol():
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == {name for name in vars(StepPart) if not name.startswith("_")}
