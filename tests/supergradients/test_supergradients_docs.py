"""The documentation contains the complete import map and lists the recipes that are trained in tests."""

from pathlib import Path

from slipstream.training.super_gradients import MODULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from_supergradients.md").read_text()


def import_map():
    """Return the table that the documentation must contain."""
    rows = [
        f"| `{module}` | {', '.join(f'`{name}`' for name in sorted(names) if name[0] != '_')} |"
        for module, names in MODULES.items()
        if names
    ]
    return "\n".join(["| module | names |", "|---|---|", *rows])


def test_the_import_map_lists_each_name_that_can_be_imported():
    assert import_map() in PAGE


def test_the_table_of_recipes_lists_the_recipes_that_are_trained_in_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/recipes"))
    from test_recipes_as_they_are import TRAINED

    rows = [line for line in PAGE.splitlines() if "| yes | yes |" in line]
    named = {name.strip(" `") for row in rows for name in row.split("|")[1].split(",")}
    assert named == set(TRAINED)
