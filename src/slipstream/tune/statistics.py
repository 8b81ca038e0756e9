"""Estimate the ratio of two step times from alternating measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

_CONFIDENCE = 0.9


@dataclass(frozen=True)
class Estimate:
    """The median of ratios, with an interval between two order statistics.

    For a fixed number of at least five independent rounds, the interval would contain the median with a probability of
    at least 90%. Because the measurement ends as soon as the result is clear, the probability is lower.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def width(self) -> float:
        """Width of the interval relative to its lower end."""
        return self.high / self.low - 1


def estimate(ratios: Sequence[float]) -> Estimate:
    """Return the median of the ratios and its confidence interval (see `median_interval`).

    Args:
        ratios: at least one positive number.
    """
    return Estimate(median(ratios), *median_interval(ratios, _CONFIDENCE), len(ratios))


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the distribution-free confidence interval of the median.

    The bounds of the interval are two order statistics. The method assumes only that the values are independent. If
    there are too few values for this confidence (for 90%, fewer than five), the result is the range of the values.

    Args:
        values: at least one number.
        confidence: the minimum probability with which the interval contains the median of the distribution.
    """
    ordered = sorted(values)
    count, cut = len(ordered), 0
    # The median is below the k-th smallest of n values with probability sum(comb(n, i) for i < k) / 2**n.
    while cut + 1 < count / 2 and _coverage(count, cut + 1) >= confidence:
        cut += 1
    return ordered[cut], ordered[count - 1 - cut]


def _coverage(count: int, cut: int) -> float:
    outside = 2 * sum(comb(count, i) for i in range(cut + 1))
    return 1.0 - outside / float(2**count)


def difference(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the relative differences from the baseline in the first loss, and in the mean of all losses.

    A difference is NaN or infinite if a loss is NaN or infinite.
    """
    means = sum(losses) / len(losses), sum(baseline) / len(baseline)
    return _relative(losses[0], baseline[0]), _relative(*means)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12)
