"""Replace this module with Slipstream's `super_gradients` in processes that have not imported the replacement."""

import importlib
import sys

__all__: list[str] = []

if __name__ == "super_gradients":
    del sys.modules[__name__]
    importlib.import_module("slipstream.supergradients")
    importlib.import_module(__name__)
