"""Combine CRC-32 checksums of consecutive chunks."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["combine_checksums"]

_POLYNOMIAL = 0xEDB88320  # CRC-32; bit 31 is the coefficient of x^0, and bit 0 is the coefficient of x^31
_ONE, _X_TO_8 = 1 << 31, 1 << 23


def combine_checksums(checksums: Sequence[int], length: int) -> int:
    """Return the CRC-32 of a sequence of chunks, given the CRC-32 of each chunk.

    All chunks except the first are `length` bytes long.

    The CRC of a sequence `a + b` is `crc(a) * x^(8 * len(b)) + crc(b)`, as polynomials modulo the CRC-32 polynomial.
    """
    factor, total = _power(length), 0
    for checksum in checksums:
        total = _multiply(factor, total) ^ checksum
    return total


def _power(count: int) -> int:
    """Return x^(8 * count)."""
    power, base = _ONE, _X_TO_8
    while count:
        if count & 1:
            power = _multiply(power, base)
        base, count = _multiply(base, base), count >> 1
    return power


def _multiply(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
