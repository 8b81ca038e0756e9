"""Tests of the settings in `report.json`, and of comparing the settings of two runs."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from records import record, text_of

from slipstream.redaction import redact
from slipstream.report.comparison import compare, comparison_csv, comparison_page
from slipstream.report.config_values import flat_config
from tiny_runs import Net


def compared(one, other):
    """Return the text of the page and the CSV table that compare two runs with these configurations."""
    records = [record(config=json.loads(json.dumps(flat_config(config)))) for config in (one, other)]
    runs = compare([(Path("a"), records[0]), (Path("b"), records[1])])
    return text_of(comparison_page(runs)), comparison_csv(runs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.bfloat16, torch.float16),
        (np.dtype("int8"), np.dtype("int16")),
        (np.float32(1), np.float32(2)),
        (torch.device("cpu"), torch.device("cuda")),
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(3), torch.ones(3, 1)),
        (torch.ones(99, dtype=torch.bfloat16), torch.arange(99).bfloat16()),
        (np.arange(99), np.arange(1, 100)),
        ({1, 2}, {1, 3}),
        (functools.partial(F.relu, inplace=True), functools.partial(F.relu, inplace=False)),
        (functools.partial(F.relu), functools.partial(F.gelu)),
        ("x" * 300 + "a", "x" * 300 + "b"),
        ([0.1234567] * 31 + [1.0], [0.1234567] * 31 + [2.0]),
        ([0] * 5000, [0] * 4999 + [1]),
        ([1], ["1"]),
        ([1], [True]),
        ([1], "[1]"),
        (range(2), range(3)),
        (b"a", b"b"),
        (complex(1, 2), complex(1, 3)),
    ],
)
def test_different_values_are_shown_as_different(one, other):
    text, table = compared({"model": {"value": one}}, {"model": {"value": other}})
    assert "identical" not in text
    name = "..." if isinstance(one, list) and len(one) == 5000 else "model.value"
    assert name in table.splitlines()[0]


@pytest.mark.parametrize("value", [{}, [], None, ""])
def test_empty_value_differs_from_an_absent_key(value):
    text, table = compared({"model": {"value": value}}, {"model": {"type": "Net"}})
    assert "not set" in text
    assert "model.value" in table.splitlines()[0]


@pytest.mark.parametrize(
    "value",
    [torch.bfloat16, np.float32(2), torch.arange(99), {"b", "a"}, functools.partial(F.relu, inplace=True)],
)
def test_equal_values_are_shown_as_identical(value):
    text, table = compared({"value": value}, {"value": value})
    assert "identical" in text
    assert "value" not in table.splitlines()[0]
    assert "not recorded" not in text


def test_comparison_names_the_settings_whose_values_are_not_recorded():
    config = {"model": Net(), "act": lambda x: x, "name": Net, "api_key": "s3cr3t"}
    text, _ = compared(redact(config), redact(config))
    assert "secrets, whose values are not recorded and may differ: act, api_key, model." in text


def test_arguments_of_partials_and_items_of_sets_contain_no_secrets():
    token = "ghp_" + "a1" * 18
    config = {
        "call": functools.partial(dict, api_key="s3cr3t", note=token),
        "names": {token},
        "password": b"x",
    }
    values = flat_config(redact(config))
    assert values["call.keywords.api_key"] == values["password"] == "<redacted>"
    assert not [value for value in values.values() if token in str(value)]
