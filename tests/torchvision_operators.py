"""Import torchvision in tests, also if its compiled operators do not belong to the installed build of torch.

The package index has no torchvision wheel for CPU builds of torch; its Python modules work with definitions of the
operators.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


def import_torchvision() -> ModuleType:
    """Return torchvision; skip the test if it is not installed."""
    pytest.importorskip("torch")
    from zoo_models import define_torchvision_operators

    try:
        import torchvision
    except RuntimeError:  # an operator does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        define_torchvision_operators()
        import torchvision
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")
    import torchvision.transforms.v2

    return torchvision
