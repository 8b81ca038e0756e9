"""Test that loading a dumped configuration returns an equal configuration."""

import enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.config import Config
from slipstream.config.merge import DELETE
from slipstream.errors import ConfigError
from slipstream.redaction import redact

SUFFIXES = [".py", ".yaml", ".json", ".toml"]

# Reserved words, names that Python normalizes in source code, and names that a dumped Python file uses itself.
tricky = st.sampled_from(
    ["my-key", "ﬁ", "dict", "float", "globals", "class", "é", "a b", "1e-3", "null", "", "on"]
)
keys = (st.text(max_size=6) | tricky).filter(lambda k: k != DELETE)
top_keys = keys.filter(
    lambda k: (
        k not in ("filename", "text", "pretty_text", "env_variables", "_base_")
        and not (k.startswith("__") and k.endswith("__"))
    )
)
texts = st.text() | st.sampled_from(
    ["1e-3", "1", "true", "none", "null", "~", "2024-01-01", "12:30", "a\u2028\x85\r\n"]
)
numbers = st.booleans() | st.integers() | st.floats(allow_nan=False)


def trees(scalars, tuples):
    def grow(inner):
        more = st.lists(inner, max_size=3)
        return more | st.dictionaries(keys, inner, max_size=3) | (more.map(tuple) if tuples else st.nothing())

    return st.dictionaries(top_keys, st.recursive(scalars, grow, max_leaves=10), max_size=4)


def listed(value):
    if isinstance(value, dict):
        return {k: listed(v) for k, v in value.items()}
    return [listed(v) for v in value] if isinstance(value, list | tuple) else value


def typed(value):
    """Return `value` with its types, to distinguish 1 from 1.0 and True, and lists from tuples."""
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(typed(v) for v in value)
    return type(value).__name__, value


def reloaded(values, suffix):
    text = Config(values, filename="x" + suffix).dump(secrets=True)  # random keys may be names of secrets
    return Config.fromstring(text, suffix).to_dict()


@given(trees(st.none() | numbers | texts, tuples=True))
@example({"PWD": -10000})
@example({"a": float("inf"), "b": (float("-inf"),), "float": 1.0, "dict": {"x": {}}})
@example({"long": {"k" * 30: ["x" * 40, ("y" * 60,), {"a b": (), "c": []}]}})
def test_python_files_round_trip_exactly(values):
    assert typed(reloaded(values, ".py")) == typed(values)
    assert typed(Config.fromstring(Config(values).pretty_text, ".py").to_dict()) == typed(redact(values))


@given(trees(st.none() | numbers | texts, tuples=True))
def test_yaml_and_json_round_trip_with_tuples_as_lists(values):
    for suffix in (".yaml", ".json"):
        assert typed(reloaded(values, suffix)) == typed(listed(values))


@given(trees(numbers | texts, tuples=True))
def test_toml_round_trips_with_tuples_as_lists(values):
    assert typed(reloaded(values, ".toml")) == typed(listed(values))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_dump_writes_a_file_in_the_format_of_its_suffix(tmp_path, suffix):
    cfg = Config({"a": {"b": [1, "zwölf", 1e-3]}, "c": True})
    path = tmp_path / f"out{suffix}"
    assert cfg.dump(path) is None
    assert Config.fromfile(path) == cfg


def test_strings_that_look_like_numbers_remain_strings_in_yaml():
    assert reloaded({"a": "1e-3", "b": 1e-3, "c": 1e22}, ".yaml") == {"a": "1e-3", "b": 1e-3, "c": 1e22}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_classes_functions_and_dtypes_become_import_strings(suffix):
    values = {
        "a": torch.nn.Linear,
        "b": torch.nn.functional.relu,
        "c": torch.bfloat16,
        "d": Path("x") / "y",
        "e": len,
    }
    assert reloaded(values, suffix) == {
        "a": "torch.nn.modules.linear.Linear",
        "b": "torch.nn.functional.relu",
        "c": "torch.bfloat16",
        "d": str(Path("x/y")),
        "e": "builtins.len",
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_subclasses_of_plain_types_are_converted_to_plain_types(suffix):
    class Mode(enum.StrEnum):
        FAST = "fast"

    values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64(0.1), "d": Mode.FAST}
    assert typed(reloaded(values, suffix)) == typed({"a": 0.5, "b": 3, "c": 0.1, "d": "fast"})


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("value", [lambda x: x, object(), torch.zeros(2), {1, 2}, b"x"])
def test_unsupported_objects_raise_an_error_that_names_the_key(suffix, value):
    with pytest.raises(ConfigError, match=r"^hooks\.1\.fn: .*cannot be written to a file"):
        reloaded({"hooks": [{}, {"fn": value}]}, suffix)


def test_python_source_is_wrapped_and_readable():
    text = Config(
        {"model": {"type": "Net", "stages": [{"name": "x" * 40, "depth": i} for i in range(3)]}}
    ).pretty_text
    assert text.startswith("model = dict(\n    type='Net',\n    stages=[\n        dict(name='xxx")
    assert max(map(len, text.splitlines())) <= 110
