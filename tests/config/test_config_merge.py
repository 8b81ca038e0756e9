"""Tests of the properties of `merge`, `nest` and `dotted_keys`."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.merge import dotted_keys, merge, nest
from slipstream.errors import ConfigError

names = st.sampled_from("abc")
leaves = st.integers(0, 5) | st.lists(st.integers(0, 5), max_size=2)


def layers(depth=2):
    """Return a strategy for layers that can be merged: `a` is always a dict, and `b` and `c` are always leaves."""
    optional = {"b": leaves, "c": leaves}
    if depth:
        optional["a"] = layers(depth - 1)
    return st.fixed_dictionaries({}, optional=optional)


def leaf_paths(tree, path=()):
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in leaf_paths(value, (*path, key)).items()}
    return {path: tree}


@given(layers(), layers(), layers())
def test_merging_is_associative(a, b, c):
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(layers())
def test_empty_layer_is_neutral_and_merging_is_idempotent(a):
    assert merge(a, {}) == merge({}, a) == merge(a, a) == a


@given(layers(), layers())
def test_every_leaf_comes_from_the_upper_layer_if_present(a, b):
    merged = leaf_paths(merge(a, b))
    lower, upper = leaf_paths(a), leaf_paths(b)
    for path, value in merged.items():
        assert value == upper.get(path, lower.get(path))
    assert {p for p, v in upper.items() if v != {}} <= merged.keys()


@given(layers(), layers())
def test_layers_with_disjoint_keys_commute(a, b):
    left, right = {"x": a}, {"y": b}
    assert merge(left, right) == merge(right, left) == {"x": a, "y": b}


@given(layers(), layers())
def test_inputs_do_not_change(a, b):
    a_before, b_before = copy.deepcopy(a), copy.deepcopy(b)
    merge(a, b)
    assert (a, b) == (a_before, b_before)


@given(layers(), layers())
def test_delete_replaces_only_at_its_level(a, b):
    assert merge({"k": a, "l": a}, {"k": {"_delete_": True, **b}}) == {"k": b, "l": a}
    assert merge(a, {"_delete_": True, **b}) == b


@given(layers(), layers())
def test_delete_false_is_an_ordinary_merge(a, b):
    assert merge(a, {"_delete_": False, **b}) == merge(a, b)


@given(layers(), st.none() | leaves)
def test_leaves_replace_dicts_but_dicts_replace_only_none(a, value):
    assert merge({"k": a}, {"k": value}) == {"k": value}
    if value is None:
        assert merge({"k": value}, {"k": a}) == {"k": a}
    else:
        with pytest.raises(ConfigError) as caught:
            merge({"k": {"l": value}}, {"k": {"l": a}})
        assert caught.value.path == "k.l"


@given(st.lists(leaves, min_size=1, max_size=4), st.data())
def test_index_keys_set_items_of_lists_and_tuples(items, data):
    index = data.draw(st.integers(0, len(items) - 1))
    expected = [*items[:index], "new", *items[index + 1 :]]
    assert merge({"k": items}, {"k": {str(index): "new"}}, list_keys=True) == {"k": expected}
    assert merge({"k": tuple(items)}, {"k": {index: "new"}}, list_keys=True) == {"k": tuple(expected)}


def test_result_shares_no_container_with_the_upper_layer():
    upper = {"a": {"b": [1, {"c": 2}]}}
    merged = merge({}, upper)
    merged["a"]["b"][1]["c"] = 3
    assert upper == {"a": {"b": [1, {"c": 2}]}}


def test_nest_builds_nested_dicts_and_dotted_keys_lists_every_level():
    assert nest("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert list(dotted_keys(nest("a.b.c", 1))) == ["a", "a.b", "a.b.c"]
    assert list(dotted_keys({"h": [{"t": 1}, 2]})) == ["h", "h.0", "h.0.t", "h.1"]
