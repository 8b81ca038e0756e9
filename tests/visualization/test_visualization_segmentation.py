import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import DataError
from slipstream.visualization import colorize, contact_sheet, overlay

PALETTE = [[10, 20, 30], [200, 100, 0], [0, 0, 255]]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.uint8, np.int16, np.int64]),
    st.sampled_from([None, 255, 1]),
)
def test_colorize_matches_a_loop_over_pixels(seed, dtype, ignore_index):
    mask = np.random.default_rng(seed).choice([0, 1, 2] + [255] * (ignore_index == 255), (4, 5)).astype(dtype)
    colored = colorize(mask, PALETTE, ignore_index)
    assert colored.dtype == np.uint8
    for row, column in np.ndindex(mask.shape):
        expected = [0, 0, 0] if mask[row, column] == ignore_index else PALETTE[mask[row, column]]
        assert colored[row, column].tolist() == expected


def test_colorize_supports_256_classes_and_a_negative_ignore_index():
    palette = np.random.default_rng(0).integers(0, 256, (256, 3))
    mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(colorize(mask, palette, -1).reshape(-1, 3), palette)
    assert colorize(np.array([[-1, 0]]), PALETTE, -1).tolist() == [[[0, 0, 0], PALETTE[0]]]


@pytest.mark.parametrize(("ids", "named"), [([[0, 3, 7]], r"\[3, 7\]"), ([[-1, 0, 0]], r"\[-1\]")])
def test_class_id_without_a_color_raises_an_error(ids, named):
    with pytest.raises(DataError, match=rf"class ids {named}, but the palette has 3 colors"):
        colorize(np.array(ids), PALETTE)


def test_overlay_blends_with_alpha_and_does_not_change_ignored_pixels():
    image = np.full((1, 3, 3), 100, np.uint8)
    mask = np.array([[0, 1, 255]], np.uint8)
    mixed = overlay(image, mask, PALETTE, alpha=0.25, ignore_index=255)
    expected = [np.rint(75 + 0.25 * np.array(PALETTE[i])) for i in (0, 1)]
    np.testing.assert_array_equal(mixed[0], [*expected, [100, 100, 100]])
    assert mixed.dtype == np.uint8
    np.testing.assert_array_equal(overlay(image[:, :2], mask[:, :2], PALETTE, alpha=0), image[:, :2])
    np.testing.assert_array_equal(overlay(image[:, :2], mask[:, :2], PALETTE, alpha=1), [PALETTE[:2]])


def test_contact_sheet_shows_every_image_in_its_column_and_row():
    colors = [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (9, 99, 199)]]
    rows = [[np.full((40, 80, 3), color, np.uint8) for color in row] for row in colors]
    sheet = np.asarray(contact_sheet(rows, titles=("image", "prediction")))
    centers = {}
    for row in colors:
        for color in row:
            ys, xs = np.nonzero((sheet == color).all(axis=2))
            assert len(ys) == 320 * 160
            centers[color] = (ys.mean(), xs.mean())
    (a, b), (c, d) = [[centers[color] for color in row] for row in colors]
    assert a[0] == b[0] < c[0] == d[0]
    assert a[1] == c[1] < b[1] == d[1]


def test_contact_sheet_has_titles_captions_and_a_wrapped_legend():
    rows = [[np.full((40, 80, 3), 128, np.uint8)] * 3] * 2
    legend = [(f"class number {i}", (i, 255 - i, 7)) for i in range(19)]
    bare = contact_sheet(rows)
    full = contact_sheet(rows, captions=["first", "second"], legend=legend)
    assert full.width == bare.width
    assert full.height > bare.height + 3 * 20
    pixels = np.asarray(full)
    lines = set()
    for _, color in legend:
        ys, xs = np.nonzero((pixels == color).all(axis=2))
        assert len(ys) > 100
        assert xs.max() < full.width - 24
        lines.add(ys.min())
    assert len(lines) > 1


def test_ignored_pixels_are_pale_if_a_class_is_black():
    mask = np.array([[0, 1, 9]])
    colored = colorize(mask, [[0, 0, 0], [200, 100, 0]], ignore_index=9).tolist()
    assert colored[0][:2] == [[0, 0, 0], [200, 100, 0]]
    assert min(colored[0][2]) > 200
