"""docs/extending.md: its file equals the one in the package, and its Python blocks run."""

import re
from pathlib import Path

import torch

from slipstream.speed import gradient_centralization
from slipstream.step.parts import StepPart

PAGE = Path(__file__).parents[2] / "docs/extending.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_file_equals_that_of_the_package():
    assert BLOCKS[0] == Path(gradient_centralization.__file__).read_text(encoding="utf-8")


def test_line_equals_that_of_the_plan():
    (line,) = re.findall(r"```text\n(.*?)\n```", TEXT, re.DOTALL)
    plan = Path(gradient_centralization.__file__).with_name("plan.py").read_text(encoding="utf-8")
    assert re.sub(r"\s", "", line) in re.sub(r"\s", "", plan)


def test_each_block_runs():
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert len(BLOCKS) == 3
    scope = {"__name__": gradient_centralization.__name__}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), scope)
    moved = (scope["model"][0].bias - scope["before"]).abs().detach()
    assert moved.count_nonzero() > 0
    torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.1))


def test_table_lists_the_whole_protocol():
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == {name for name in vars(StepPart) if not name.startswith("_")} - {"context"}


def test_links_are_valid():
    for link in re.findall(r"\]\(([^)#\s]+)\)", TEXT):
        assert (PAGE.parent / link).exists(), link
