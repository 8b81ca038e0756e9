"""Base classes of modules."""

from slipstream.model.base_module import BaseModule, ModuleDict, ModuleList, Sequential

__all__ = ["BaseModule", "ModuleDict", "ModuleList", "Sequential"]
