"""Test that docs/extending.md shows the current source code of an option and lists all methods of `StepPart`."""

import re
from pathlib import Path

from doc_pages import blocks, text_of

from slipstream.speed import gradient_centralization
from slipstream.step.parts import StepPart

PAGE = "docs/extending.md"
TEXT = text_of(PAGE)


def test_lines_on_the_page_are_in_the_source_code():
    source = Path(gradient_centralization.__file__)
    code = source.read_text(encoding="utf-8") + source.with_name("plan.py").read_text(encoding="utf-8")
    for block in blocks("text", PAGE):
        for line in block.text.splitlines()[1:]:
            assert line.strip() in code


def test_table_lists_every_method_of_the_protocol():
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == {name for name in vars(StepPart) if not name.startswith("_")}
