"""Install the import finder for `mmengine` before each test module in this folder, and remove it afterwards."""

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_traces():
    from slipstream.openmmlab.finder import _WORKERS, _Finder, install

    install()
    yield

    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name.split(".")[0] == "mmengine"]:
        del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if folder != _WORKERS]
