"""Replace this module with Slipstream's `mmengine` in processes that have not imported `slipstream.openmmlab`."""

import importlib
import sys

__all__: list[str] = []

if __name__ == "mmengine":
    del sys.modules[__name__]
    importlib.import_module("slipstream.openmmlab")
    importlib.import_module(__name__)
