"""Estimate the ratio of two step times from alternating measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

__all__ = ["Estimate", "difference", "estimate"]

_CONFIDENCE = 0.9


@dataclass(frozen=True)
class Estimate:
    """The median of ratios, with an interval between two order statistics.

    For a fixed number of at least five independent rounds, it would contain the median with a probability of at least
    90%. Because the measurement ends as soon as the result is clear, the probability is lower.
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
    """Return the median of the ratios and its distribution-free confidence interval.

    The interval is between two order statistics: it assumes only that the ratios are independent. With fewer than five
    ratios, it is their range, whose confidence is lower than 90%.

    Args:
        ratios: at least one positive number.
    """
    ordered = sorted(ratios)
    count, cut = len(ordered), 0
    # The median is below the k-th smallest of n values with probability sum(comb(n, i) for i < k) / 2**n.
    while cut + 1 < count / 2 and _coverage(count, cut + 1) >= _CONFIDENCE:
        cut += 1
    return Estimate(median(ordered), ordered[cut], ordered[count - 1 - cut], count)


def _coverage(count: int, cut: int) -> float:
    outside = 2 * sum(comb(count, i) for i in range(cut + 1))
    return 1.0 - outside / float(2**count)


def difference(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the relative differences of the first loss, and of the mean of all losses.

    A value is NaN or infinite if a loss is.
    """
    means = sum(losses) / len(losses), sum(baseline) / len(baseline)
    return _relative(losses[0], baseline[0]), _relative(*means)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12)
