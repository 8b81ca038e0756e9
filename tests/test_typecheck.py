"""Checks of option values against type annotations."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.typecheck import (
    AllOrPositiveInt,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    PositiveInt,
    Probability,
    check,
    describe,
    matches,
)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        ("a", str),
        ([1], list[int]),
        ((1, 2), list[int]),
        ([1, 2], tuple[int, int]),
        ([], list[int]),
        ([1, 2, 3], tuple[int, ...]),
        ([[1, 2.5], None], list[list[float] | None]),
        ({"a": 1}, dict[str, Any]),
        (None, None),
        (None, int | None),
        (3, Optional[int]),  # noqa: UP045  (this spelling is under test)
        ("a", Literal["a", "b"]),
        ("b", Literal["a"] | str),
        (object(), Any),
        ([1, 2], Sequence[int]),
        (range(3), Sequence[int]),  # elements are only checked in lists and tuples
        ({}, Mapping[str, int]),
        (Path("a"), str | Path),
        (math.inf, Number),
        (0, NonNegative),
        (10**400, float),
        (-1, AllOrPositiveInt),
        (1, Probability),
        ({1}, set),  # this type is not checked, so any value is accepted
        (len, Callable[..., Any]),
    ],
)
def test_matching_values_are_accepted(value, annotation):
    assert matches(value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (False, int | None),
        (1.0, int),
        ("1", int),
        ("1e-3", float),
        (1, bool),
        (1, str),
        (None, str),
        ("abc", list[str]),
        (["a", 1], list[str]),
        ([1, True], list[int]),
        ([1, 2, 3], tuple[int, int]),
        ([1, "2"], tuple[int, ...]),
        ({"a": "b"}, dict[str, int]),
        ({1: 2}, dict[str, int]),
        (True, Literal[1, 2]),
        ({1, 2}, list[int]),
        ([("a", 1)], dict),
        (0, None),
        ("c", Literal["a", "b"]),
        ([], int | str | None),
        (math.nan, float),
        (math.inf, float),
        (math.nan, Number),
        (True, Number),
        (math.inf, Positive),
        (0, Positive),
        (-0.5, NonNegative),
        (math.nan, NonNegative),
        (0, PositiveInt),
        (1.0, PositiveInt),
        (True, PositiveInt),
        (-1, NonNegativeInt),
        (-2, AllOrPositiveInt),
        (1.5, Probability),
        ([1, math.nan], list[float]),
        ("abc", Sequence[str]),
        ({"a": 1}, Sequence[Any]),
        ([1, "2"], Sequence[int]),
        ([1], Mapping[str, int]),
        (3, str | Path),
        (3, Callable[..., Any]),
    ],
)
def test_mismatched_values_are_rejected(value, annotation):
    assert not matches(value, annotation)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(PLAIN, st.sampled_from([int, str, bool, float, list]), st.sampled_from([int, str, None, list]))
def test_union_accepts_values_of_any_member(value, one, other):
    assert matches(value, one | other) == (matches(value, one) or matches(value, other))


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (str | None, "str or None"),
        (Optional[float], "finite float or None"),  # noqa: UP045
        (Literal["a", "b"], "'a' or 'b'"),
        (list[str | None], "list[str or None]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Literal["torch"] | bool | None, "'torch' or bool or None"),
        (PositiveInt | None, "int of at least 1 or None"),
        (list[Probability], "list[float between 0 and 1]"),
        (Annotated[str | None, "not a rule"], "str or None"),
        (Mapping[str, Any] | Sequence[int], "dict or list[int]"),
        (Callable[..., Any], "a function"),
    ],
)
def test_describe_converts_annotations_to_text(annotation, words):
    assert describe(annotation) == words


def test_check_error_contains_the_path_and_part_of_the_value():
    with pytest.raises(ConfigError) as caught:
        check("x" * 1000, PositiveInt, "train_cfg.max_epochs")
    text = str(caught.value)
    assert text.startswith("train_cfg.max_epochs: must be an int of at least 1, not 'xxx")
    assert len(text) < 300
