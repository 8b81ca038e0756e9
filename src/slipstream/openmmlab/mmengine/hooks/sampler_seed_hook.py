"""`DistSamplerSeedHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import DistSamplerSeedHook

__all__ = ["DistSamplerSeedHook"]
