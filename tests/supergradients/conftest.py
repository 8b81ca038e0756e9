"""Remove the import finder for `super_gradients` after each test module in this folder."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_traces() -> Iterator[None]:
    yield
    from slipstream.training.super_gradients import _FOLDER, _Finder

    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    sys.path[:] = [folder for folder in sys.path if folder != str(_FOLDER / "workers")]
