"""The documentation lists the recipes that are trained in tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from_supergradients.md").read_text()


def test_the_table_of_recipes_lists_the_recipes_that_are_trained_in_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/recipes"))
    from test_recipes_as_they_are import TRAINED

    rows = [line for line in PAGE.splitlines() if "| yes | yes |" in line]
    named = {name.strip(" `") for row in rows for name in row.split("|")[1].split(",")}
    assert named == set(TRAINED)
