"""Replaces itself with Slipstream's `mmengine` in a process that has not imported `slipstream.openmmlab` yet."""

import importlib
import sys

__all__: list[str] = []

if __name__ == "mmengine":
    del sys.modules[__name__]
    importlib.import_module("slipstream.openmmlab")
    importlib.import_module(__name__)
