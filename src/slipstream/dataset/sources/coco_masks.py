"""Masks from polygons and run lengths, with the same pixels as masks from the COCO API (`pycocotools`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError

__all__ = ["fill_polygon", "fill_runs", "read_outline"]

Outline: TypeAlias = list[NDArray[np.float64]] | NDArray[np.int64]
"""Polygons, each (points, 2) with x and y in pixels, or run lengths."""
Ints: TypeAlias = NDArray[np.int64]

_CELLS_PER_PIXEL = 5
"""The COCO API rounds points to a grid with this many cells per pixel in each direction."""
_CENTER = _CELLS_PER_PIXEL // 2
_MAX_COORDINATE = 100_000
"""Limit on the absolute value of coordinates, because memory usage grows with the length of the outline."""


def read_outline(value: Any, shape: tuple[int, int]) -> Outline:
    """Return the `segmentation` of an annotation: polygons, or the `counts` of uncompressed run lengths.

    Args:
        value: a list of polygons `[x, y, x, y, ...]`, or `{"counts": [...], "size": [height, width]}`.
        shape: (height, width) of the image.

    Raises:
        DataError: the value has a different structure, or its size differs from `shape`.
    """
    try:
        if isinstance(value, list):
            polygons = [np.array(polygon, np.float64).reshape(-1, 2) for polygon in value]
            if not all((np.abs(points) < _MAX_COORDINATE).all() for points in polygons):
                raise ValueError(f"its coordinates must be between -{_MAX_COORDINATE} and {_MAX_COORDINATE}")
            return polygons
        counts = np.array(value["counts"], np.int64)
        pixels = shape[0] * shape[1]
        possible = counts.ndim == 1 and bool(
            ((counts >= 0) & (counts <= pixels)).all()
        )  # the sum cannot overflow
        valid = possible and counts.sum() == pixels
        if not (valid and tuple(value["size"]) == shape):
            raise ValueError(f"its run lengths do not match an image of {shape[1]} x {shape[0]} pixels")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            "a segmentation must be a list of polygons [x, y, x, y, ...] or uncompressed run lengths "
            f"{{'counts': [...], 'size': [height, width]}}: {error}"
        ) from error
    return counts


def fill_polygon(points: NDArray[np.float64], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return a (height, width) mask of the pixels inside a polygon, using the even-odd rule.

    The outline is drawn on a grid with 5 x 5 cells per pixel. In each column of pixels, a run of pixels starts or
    ends where the outline steps from the center cell to the cell to its right.
    """
    height, width = shape
    points_on_grid = np.trunc(points * _CELLS_PER_PIXEL + 0.5).astype(np.int64)
    ends = np.roll(points_on_grid, -1, axis=0)
    flat = (
        np.abs(ends - points_on_grid) @ np.array([1, -1]) >= 0
    )  # edges that are at least as wide as they are tall; all others are steep
    columns, rows = np.concatenate(
        [
            _flat_crossings(*_ordered(points_on_grid[flat], ends[flat], 0)),
            _steep_crossings(*_ordered(points_on_grid[~flat], ends[~flat], 1)),
        ],
        axis=1,
    )
    inside = (columns >= 0) & (columns < width)
    mask = np.zeros((width, height), bool)
    if inside.any():
        columns, rows = columns[inside], np.clip((rows[inside] + _CENTER) // _CELLS_PER_PIXEL, 0, height)
        first, last = int(columns.min()), int(columns.max()) + 1
        steps = np.bincount((columns - first) * height + rows, minlength=(last - first) * height + 1)
        mask[first:last] = (steps.cumsum()[:-1] % 2).reshape(-1, height)
    return mask.T


def fill_runs(counts: Sequence[int] | Ints, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the (height, width) mask for the lengths of alternating runs of 0 and 1 in column-major order."""
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(shape[1], shape[0]).T


def _ordered(first: Ints, last: Ints, axis: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the x and y coordinates of each edge's start and end. The start has the smaller coordinate on `axis`."""
    swapped = (first[:, axis] > last[:, axis])[:, None]
    start, end = np.where(swapped, last, first), np.where(swapped, first, last)
    return start[:, 0], start[:, 1], end[:, 0], end[:, 1]


def _flat_crossings(x0: Ints, y0: Ints, x1: Ints, y1: Ints) -> Ints:
    """Return the pixel columns and grid rows, (2, steps), where edges that are not steep cross a center cell."""
    low = -(
        (_CENTER - x0) // _CELLS_PER_PIXEL
    )  # the first column whose center cell is not to the left of the edge
    edge, offset = _ragged(np.maximum((x1 - _CENTER - 1) // _CELLS_PER_PIXEL - low + 1, 0))
    columns = low[edge] + offset
    slope, steps = (y1 - y0)[edge] / (x1 - x0)[edge], columns * _CELLS_PER_PIXEL + _CENTER - x0[edge]
    rows = np.minimum(
        np.trunc(y0[edge] + slope * steps + 0.5), np.trunc(y0[edge] + slope * (steps + 1) + 0.5)
    )
    return np.stack([columns, rows.astype(np.int64)])


def _steep_crossings(x0: Ints, y0: Ints, x1: Ints, y1: Ints) -> Ints:
    """Return the pixel columns and grid rows, (2, steps), where steep edges cross a center cell."""
    edge, offset = _ragged(y1 - y0)
    slope = (x1 - x0)[edge] / (y1 - y0)[edge]
    before = np.trunc(x0[edge] + slope * offset + 0.5).astype(np.int64)
    after = np.trunc(x0[edge] + slope * (offset + 1) + 0.5).astype(np.int64)
    cells = np.minimum(before, after)
    crosses_center = (before != after) & (cells % _CELLS_PER_PIXEL == _CENTER)
    return np.stack([cells // _CELLS_PER_PIXEL, y0[edge] + offset])[:, crosses_center]


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Return the row of each element and its position in that row, for rows of the given lengths."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
