"""Test that docs/trainer.md lists each key."""

import dataclasses
import re
from pathlib import Path

from slipstream.training.params import TrainingParams

PAGE = Path(__file__).parents[2] / "docs/trainer.md"


def test_table_of_keys_lists_each_key():
    table = PAGE.read_text(encoding="utf-8").partition("## All keys")[2]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert named - {"training_params", "test_loaders"} == {
        field.name for field in dataclasses.fields(TrainingParams)
    }
