"""Tests of the ratio of two step times and of its confidence interval."""

import math
import random

import pytest

from slipstream.tune.statistics import difference, estimate


def test_interval_contains_the_true_median_in_at_least_90_percent_of_samples():
    rng = random.Random(0)
    for count in (5, 8, 12):
        hits = 0
        for _ in range(2000):
            found = estimate([math.exp(rng.gauss(0.2, 0.5)) for _ in range(count)])
            hits += found.low <= math.exp(0.2) <= found.high
        assert hits / 2000 > 0.88, count


def test_one_outlier_does_not_change_the_ratio():
    assert estimate([1.1, 1.1, 1.1, 1.1, 50.0]).ratio == 1.1


def test_interval_becomes_narrower_than_the_range_with_more_rounds():
    values = [1.0, *[1.2] * 10, 9.0]
    found = estimate(values)
    assert (found.low, found.high) == (1.2, 1.2)
    assert found.width == 0


def test_interval_of_fewer_than_five_ratios_is_their_range():
    found = estimate([0.9, 1.2, 1.0])
    assert (found.low, found.ratio, found.high, found.rounds) == (0.9, 1.0, 1.2, 3)


def test_difference_is_relative_and_nan_for_nan():
    assert difference([1.1, 1.1], [1.0, 1.2]) == pytest.approx((0.1, 0.0))
    assert math.isnan(difference([1.0, math.nan], [1.0, 1.0])[1])
