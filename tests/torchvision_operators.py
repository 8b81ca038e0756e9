"""Import torchvision and timm in tests, on machines without a build of torchvision for the installed torch.

The package index has no torchvision wheel for CPU builds of torch. If another build is installed, its Python modules
work with definitions of the operators. If there is none, timm can be imported with a stand-in for torchvision, because
its networks use only one class.
"""

import enum
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
MODULES = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")


class StandIn(ModuleType):
    """A module of torchvision whose attributes are empty classes."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def import_torchvision():
    """Return torchvision; skip the test if it is not installed."""
    from zoo_models import define_torchvision_operators

    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    try:
        import torchvision
    except RuntimeError:  # an operator does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        define_torchvision_operators()
        import torchvision
    import torchvision.transforms.v2

    return torchvision


def import_timm():
    """Return timm; skip the test if it is not installed."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
        return importlib.import_module("timm")
    modules = {f"torchvision{name}": StandIn(f"torchvision{name}") for name in MODULES}
    for name, module in modules.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        vars(modules.get(parent, module))[child] = module
    names = ["NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
    modules["torchvision.transforms.functional"].InterpolationMode = enum.Enum("InterpolationMode", names)
    sys.modules.update(modules)
    try:
        return importlib.import_module("timm")
    finally:
        for name in modules:
            del sys.modules[name]
