"""Render segmentation results as images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from slipstream.errors import DataError
from slipstream.extras import extra

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image, ImageDraw

__all__ = ["colorize", "contact_sheet", "ignored_color", "overlay"]

RGB: TypeAlias = "npt.NDArray[np.uint8]"
Palette = Sequence[Sequence[int]]

_CELL_WIDTH = 320  # width of an image, in pixels
_GAP = 12
_MARGIN = 24
_TEXT, _PALE, _PAPER = (28, 30, 33), (110, 115, 122), (255, 255, 255)
_IGNORED = (228, 230, 234)
_TITLE_SIZE, _TEXT_SIZE = 18, 15
_SWATCH = 16


def colorize(mask: npt.NDArray[Any], palette: Palette, ignore_index: int | None = None) -> RGB:
    """Convert `mask`, an array of integer class ids (H, W), to a uint8 RGB image (H, W, 3).

    Ignored pixels have the color `ignored_color(palette)`.

    Raises:
        DataError: if `mask` is not an integer array (H, W), or contains a class id that has no color in `palette`.
    """
    _check_mask(mask)
    ignored = np.zeros(mask.shape, bool) if ignore_index is None else mask == ignore_index
    invalid = ~ignored & ((mask < 0) | (mask >= len(palette)))
    if invalid.any():
        raise DataError(
            f"the mask contains the class ids {np.unique(mask[invalid])[:5].tolist()}, but the palette has only "
            f"{len(palette)} color{'s' * (len(palette) != 1)}; set ignore_index, or check the number of classes"
        )
    colors = np.array([*palette, ignored_color(palette)], dtype=np.uint8)
    return colors[np.where(ignored, len(palette), mask.astype(np.int64))]


def ignored_color(palette: Palette) -> tuple[int, int, int]:
    """Return the color of ignored pixels: black, or pale gray if black is the color of a class."""
    return _IGNORED if [0, 0, 0] in [list(map(int, color)) for color in palette] else (0, 0, 0)


def overlay(
    image: RGB,
    mask: npt.NDArray[Any],
    palette: Palette,
    alpha: float = 0.5,
    ignore_index: int | None = None,
) -> RGB:
    """Return `image` blended with the class colors of `mask`, as a uint8 array (H, W, 3).

    Args:
        image: RGB image, uint8 (H, W, 3).
        mask: integer class ids (H, W).
        palette: one RGB color per class.
        alpha: weight of the class colors, from 0 (image only) to 1 (colors only).
        ignore_index: class id of pixels that keep the image's color.

    Raises:
        DataError: if the sizes differ, `alpha` is out of range, or the mask is invalid (see `colorize`).
    """
    if image.shape != (*mask.shape, 3):
        raise DataError(
            f"the image has shape {image.shape}, but the mask has shape {mask.shape}; resize one of them"
        )
    if not 0 <= alpha <= 1:
        raise DataError(f"alpha must be between 0 and 1, not {alpha}")
    mixed = image * (1 - alpha) + colorize(mask, palette, ignore_index) * alpha
    tinted = np.rint(mixed).astype(np.uint8)
    return tinted if ignore_index is None else np.where((mask == ignore_index)[..., None], image, tinted)


def contact_sheet(
    rows: Sequence[Sequence[RGB]],
    titles: Sequence[str] = ("image", "truth", "prediction"),
    captions: Sequence[str | Sequence[str]] = (),
    legend: Sequence[tuple[str, Sequence[int]]] = (),
) -> Image.Image:
    """Return a grid of images, each 320 pixels wide, with column titles and a legend of the classes.

    Args:
        rows: images, uint8 (H, W, 3); each row has one image per title.
        titles: titles of the columns.
        captions: for each row, one caption or one caption per image; empty for no captions.
        legend: names and RGB colors of the classes.

    Raises:
        DataError: if there are no rows, or the numbers of titles, images and captions do not match.
    """
    with extra("images"):
        from PIL import Image, ImageDraw

    _check_rows(rows, titles, captions)
    cells = [[_resize(Image.fromarray(picture)) for picture in row] for row in rows]
    width = 2 * _MARGIN + len(titles) * _CELL_WIDTH + (len(titles) - 1) * _GAP
    caption_height = _TEXT_SIZE + 8 if captions else 0
    heights = [max(cell.height for cell in row) + caption_height + _GAP for row in cells]
    entries, legend_height = _legend_layout(legend, width)
    top = _MARGIN + _TITLE_SIZE + 10
    sheet = Image.new("RGB", (width, top + sum(heights) + legend_height + _MARGIN - _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((_left(column), top - 10), title, _TEXT, _font(_TITLE_SIZE), anchor="ls")
    for index, row in enumerate(cells):
        for column, cell in enumerate(row):
            sheet.paste(cell, (_left(column), top))
        top += heights[index]
        for column, line in enumerate(_lines(captions[index]) if captions else ()):
            draw.text((_left(column), top - _GAP - 7), line, _PALE, _font(_TEXT_SIZE), anchor="ls")
    _draw_legend(draw, entries, top + 4)
    return sheet


def _lines(caption: str | Sequence[str]) -> Sequence[str]:
    return [caption] if isinstance(caption, str) else caption


def _left(column: int) -> int:
    return _MARGIN + column * (_CELL_WIDTH + _GAP)


def _resize(picture: Image.Image) -> Image.Image:
    from PIL import Image

    height = max(1, round(picture.height * _CELL_WIDTH / picture.width))
    # NEAREST keeps class boundaries sharp when an image is enlarged.
    resample = Image.Resampling.NEAREST if picture.width < _CELL_WIDTH else Image.Resampling.BOX
    return picture.resize((_CELL_WIDTH, height), resample)


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


_Entry = tuple[int, int, str, Sequence[int]]  # left, top, name, color


def _legend_layout(legend: Sequence[tuple[str, Sequence[int]]], width: int) -> tuple[list[_Entry], int]:
    """Return the position of each legend entry, wrapped at the sheet width, and the height of the legend."""
    if not legend:
        return [], 0
    line_height = _SWATCH + 10
    x, y, entries = _MARGIN, 0, []
    for name, color in legend:
        size = _SWATCH + 6 + int(_font(_TEXT_SIZE).getlength(name)) + 20
        if x > _MARGIN and x + size > width - _MARGIN:
            x, y = _MARGIN, y + line_height
        entries.append((x, y, name, color))
        x += size
    return entries, y + line_height + 4


def _draw_legend(draw: ImageDraw.ImageDraw, entries: list[_Entry], top: int) -> None:
    for x, y, name, color in entries:
        box = (x, top + y, x + _SWATCH, top + y + _SWATCH)
        draw.rectangle(box, fill=tuple(int(c) for c in color), outline=_PALE)
        middle = top + y + _SWATCH // 2
        draw.text((x + _SWATCH + 6, middle), name, _TEXT, _font(_TEXT_SIZE), anchor="lm")


def _check_mask(mask: Any) -> None:
    if not (isinstance(mask, np.ndarray) and mask.ndim == 2 and np.issubdtype(mask.dtype, np.integer)):
        actual = f"{mask.dtype} {tuple(mask.shape)}" if hasattr(mask, "dtype") else type(mask).__name__
        raise DataError(f"a mask must be an integer NumPy array (H, W), not {actual}")


def _check_rows(
    rows: Sequence[Sequence[RGB]], titles: Sequence[str], captions: Sequence[str | Sequence[str]]
) -> None:
    if not rows:
        raise DataError("a contact sheet requires at least one row of images")
    for index, row in enumerate(rows):
        if len(row) != len(titles):
            raise DataError(
                f"row {index}: the number of images ({len(row)}) must match the number of titles ({len(titles)})"
            )
    if captions and len(captions) != len(rows):
        raise DataError(
            f"the number of captions ({len(captions)}) must match the number of rows ({len(rows)})"
        )
