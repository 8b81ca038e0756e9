"""Test that the table in docs/trainer.md matches the code."""

from pathlib import Path

from slipstream.training.params import TrainingParams, UnsupportedKey

PAGE = Path(__file__).parents[2] / "docs/trainer.md"


def test_table_of_keys_matches_the_code():
    assert PAGE.read_text(encoding="utf-8").split("|---|---|\n")[-1] == table()


def table():
    """Return the rows of the page's table. To update the page, replace its rows with the output of print(table())."""
    rows = []
    for key, meaning in TrainingParams.table().items():
        text = f"default value only: {meaning.reason}" if isinstance(meaning, UnsupportedKey) else meaning
        rows.append(f"| `{key}` | {text} |\n")
    return "".join(rows)
