"""Tests of curves, which have a bounded number of points."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import curve

from slipstream.errors import DataError
from slipstream.report import Curve


def test_point_summarizes_the_values_since_the_previous_point():
    made = Curve()
    made.add(3, [1.0, 2.0, 6.0])
    made.add(4, [])
    assert (made.x, made.mean, made.low, made.high) == ([3], [3.0], [1.0], [6.0])


def test_nan_and_infinity_are_counted_but_not_averaged():
    made = Curve()
    made.add(4, [1.0, math.nan, math.inf, 3.0])
    made.add(5, [math.nan])
    assert (made.mean, made.bad) == ([2.0, None], [2, 1])
    assert math.isnan(made.last())
    assert (made.lowest(), made.highest()) == (1.0, 3.0)


def test_long_curve_is_bounded_and_keeps_its_extremes_and_its_end():
    values = [math.sin(i / 1000) for i in range(100_000)]
    values[54_321] = 7.5
    values[12_345] = -9.5
    values[77_777] = math.nan
    made = curve(values)
    assert len(made) <= 1000
    assert (max(made.high), min(made.low), sum(made.bad)) == (7.5, -9.5, 1)
    assert made.x[-1] == 100_000
    assert sum(made.count) == 99_999
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(n * value for n, value in zip(made.count, made.mean, strict=True)) / sum(made.count)
    assert mean == pytest.approx(sum(finite) / len(finite), abs=1e-9)


@given(st.lists(st.floats(width=32), min_size=1, max_size=70), st.integers(2, 20))
def test_merging_never_loses_values(values, most):
    merged = curve(values).points(most)
    assert len(merged) <= most
    finite = [value for value in values if math.isfinite(value)]
    assert sum(merged.count) == len(finite)
    assert sum(merged.bad) == len(values) - len(finite)
    assert merged.lowest() == min(finite, default=None)
    assert merged.highest() == max(finite, default=None)
    assert merged.last() == values[-1] or math.isnan(values[-1])


def test_reading_the_points_does_not_change_the_curve():
    made = curve(range(9))
    made.points(3)
    assert made == curve(range(9))


def test_json_keeps_seven_significant_digits():
    made = curve([1 / 3, math.nan, 1e-30])
    copied = Curve.from_json(json.loads(json.dumps(made.to_json(), allow_nan=False)), "c")
    assert copied.mean == [0.3333333, None, 1e-30]
    assert copied.bad == [0, 1, 0]
    assert str(copied.newest) == "[0.3333333, nan, 1e-30]"
    assert Curve.from_json(json.loads(json.dumps(curve([-math.inf]).to_json())), "c").last() == -math.inf


def test_reports_of_earlier_versions_can_be_read():
    data = curve([1.0, math.nan]).to_json()
    del data["newest"]
    assert str(Curve.from_json(data, "c").newest) == "[1.0, nan]"


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {"x": [1]},
        {**curve([1.0]).to_json(), "mean": [1.0, 2.0]},
        {**curve([1.0]).to_json(), "mean": ["1"]},
        {**curve([1.0]).to_json(), "x": [None]},
        {**curve([1.0]).to_json(), "count": [True]},
        {**curve([1.0]).to_json(), "low": "1"},
        {**curve([1.0]).to_json(), "newest": ["1"]},
        {**curve([1.0]).to_json(), "mean": ["nan"]},
        {**curve([1.0]).to_json(), "high": [10**400]},
        {**curve([1.0]).to_json(), "high": [math.inf]},
        {**curve([1.0]).to_json(), "x": [1e300]},
        {**curve([1.0]).to_json(), "x": [math.nan]},
        {**curve([1.0]).to_json(), "count": [-1]},
        {**curve([1.0]).to_json(), "bad": [0.5]},
    ],
)
def test_damaged_json_raises_an_error_with_its_location(broken):
    with pytest.raises(DataError, match="the place"):
        Curve.from_json(broken, "the place")


def test_truncated_curve_ends_at_the_given_iteration():
    made = Curve()
    for x in (5, 10, 15):
        made.add(x, [float(x)])
    made.truncate(10)
    assert (made.x, made.mean, made.count) == ([5, 10], [5.0, 10.0], [1, 1])
    made.truncate(4)
    assert len(made) == 0
    assert made.last() is None
