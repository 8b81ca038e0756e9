"""Look up registered objects by import string (`mmdet.models.RetinaNet`), as used in saved configurations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["LIBRARIES", "import_registered"]

LIBRARIES = (
    "mmaction",
    "mmagic",
    "mmdet",
    "mmdet3d",
    "mmocr",
    "mmpose",
    "mmpretrain",
    "mmrotate",
    "mmseg",
    "mmyolo",
)
"""Scopes whose child registries are created by the `registry` module of the package with the same name."""

# Packages whose modules `import_registered` may import. Modules of other packages must already have been imported.
_IMPORTABLE = (*LIBRARIES, "mmcv", "mmengine", "slipstream", "torch", "torchmetrics")


def import_registered(name: str, is_registered: Callable[[Any], bool]) -> Any | None:
    """Return the object that an import string refers to, or None if it does not exist or is not registered.

    The import string may come from an untrusted configuration, so objects that are not registered are not returned.
    """
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:count]))
        if module is None:
            continue
        obj: Any = module
        for part in parts[count:]:
            obj = getattr(obj, part, None)
        return obj if callable(obj) and is_registered(obj) else None
    return None


def _module(name: str) -> Any | None:
    if name in sys.modules:
        return sys.modules[name]
    package, *rest = name.split(".")
    if package not in _IMPORTABLE or "__main__" in rest:
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If `name` ends with a class name, it is not a module. Errors for other missing modules are re-raised.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
