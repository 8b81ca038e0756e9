"""Test that the scripts before and after a migration from another framework print the same losses."""

import re

import pytest
from doc_pages import blocks

PAGES = {"docs/from_accelerate.md": "accelerate", "docs/from_lightning.md": "lightning"}
NUMBER = re.compile(r"^(?:\d )?(\d+\.\d+(?:e-\d+)?)$", re.MULTILINE)


def scripts(page: str) -> tuple[str, str]:
    """Return the first two Python blocks of a page.

    If the second block uses a Runner, shuffling is removed from both, because a Runner sets its own seed.
    """
    before, after = (block.text for block in blocks("python", page)[:2])
    if "Runner" in after:
        before, after = (text.replace(", shuffle=True", "") for text in (before, after))
    return before, after


def losses(output: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(output)]


@pytest.mark.parametrize("page", PAGES)
def test_only_the_script_before_the_migration_imports_the_other_framework(page):
    before, after = scripts(page)
    compile(before, page, "exec")
    names = [re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE) for text in (before, after)]
    assert PAGES[page] in names[0]
    assert PAGES[page] not in names[1]
    assert "slipstream" in names[1]
    assert "slipstream" not in names[0]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_script_after_the_migration_trains(page, run):
    printed = losses(run("-c", scripts(page)[1]).stdout)
    assert printed
    assert printed[-1] < 0.6  # untrained: 0.69


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_both_scripts_print_the_same_losses(page, run):
    pytest.importorskip(PAGES[page])
    before, after = (losses(run("-c", script).stdout) for script in scripts(page))
    assert before == pytest.approx(after, rel=1e-3)  # Lightning validates in bfloat16
