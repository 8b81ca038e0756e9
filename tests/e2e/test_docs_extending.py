"""Test that docs/extending.md shows the current source code of an option and lists all methods of `StepPart`."""

import re
from pathlib import Path

from doc_pages import blocks, text_of

from slipstream.speed import gradient_centralization
from slipstream.step.parts import StepPart

PAGE = "docs/extending.md"
TEXT = text_of(PAGE)


def test_page_shows_the_source_code_of_the_module():
    source = Path(gradient_centralization.__file__).read_text(encoding="utf-8")
    assert source in [block.text for block in blocks("python", PAGE)]


def test_line_on_the_page_is_in_the_plan():
    (line,) = [block.text for block in blocks("text", PAGE)]
    plan = Path(gradient_centralization.__file__).with_name("plan.py").read_text(encoding="utf-8")
    assert re.sub(r"\s", "", line) in re.sub(r"\s", "", plan)


def test_table_lists_every_method_of_the_protocol():
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == {name for name in vars(StepPart) if not name.startswith("_")}
