"""The learning rate range test."""

import math

import pytest
from PIL import Image

from slipstream.errors import ConfigError
from slipstream.tune.lr_range import LrRange, sweep_lr


def rates(count=100):
    return [1e-7 * 1e7 ** (i / (count - 1)) for i in range(count)]


def curve(rate):
    """A loss that falls around 1e-3 and rises above 1e-1."""
    return 2.0 - 1.0 / (1.0 + (1e-3 / rate) ** 2) + 5 * max(rate - 0.1, 0)


def test_suggestion_is_near_the_steepest_descent():
    found = LrRange(rates(), [curve(rate) for rate in rates()])
    assert 3e-4 < found.suggestion < 6e-3  # the moving average delays the descent
    assert "Suggested learning rate" in str(found)


def test_no_suggestion_if_the_loss_never_falls_or_the_sweep_is_too_short():
    assert LrRange(rates(), [1.0 + i for i in range(100)]).suggestion is None
    assert LrRange(rates()[:5], [5.0, 4.0, 3.0, 2.0, 1.0]).suggestion is None
    assert "does not fall" in str(LrRange(rates(), [1.0] * 100))


def test_a_loss_that_is_not_finite_is_left_out_of_the_smoothed_curve():
    found = LrRange(rates()[:20], [2.0 - 0.05 * i for i in range(19)] + [math.nan])
    assert len(found.smoothed) == 19
    assert all(map(math.isfinite, found.smoothed))


def test_plot_is_a_png_file(tmp_path):
    path = LrRange(rates(), [curve(rate) for rate in rates()]).plot(tmp_path / "lr.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(10**6)) > 10
    assert [p.name for p in tmp_path.iterdir()] == ["lr.png"]


@pytest.mark.parametrize(
    ("start", "end", "steps"), [(0, 1, 50), (1, 0.1, 50), (1e-5, math.inf, 50), (1e-5, 1, 3)]
)
def test_invalid_ranges_are_refused(start, end, steps):
    with pytest.raises(ConfigError, match="find_lr: requires"):
        sweep_lr(lambda setting: None, start, end, steps, 60)
