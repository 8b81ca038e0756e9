"""Type checks of option values against annotations."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.typecheck import describe, matches


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
        (3, Optional[int]),  # noqa: UP045  (the other spelling is what is tested)
        ("a", Literal["a", "b"]),
        ("b", Literal["a"] | str),
        (object(), Any),
        ("anything", Sequence[int]),  # not a plain type, so any value is accepted
        (len, Callable[..., Any]),
    ],
)
def test_matching_values(value, annotation):
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
    ],
)
def test_values_that_do_not_match(value, annotation):
    assert not matches(value, annotation)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(PLAIN, st.sampled_from([int, str, bool, float, list]), st.sampled_from([int, str, None, list]))
def test_union_matches_values_of_any_member(value, one, other):
    assert matches(value, one | other) == (matches(value, one) or matches(value, other))


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (str | None, "str or None"),
        (Optional[float], "float or None"),  # noqa: UP045
        (Literal["a", "b"], "'a' or 'b'"),
        (list[str | None], "list[str or None]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Literal["torch"] | bool | None, "'torch' or bool or None"),
    ],
)
def test_describe_formats_annotations(annotation, words):
    assert describe(annotation) == words
