"""StreetScenes: generated street photos with label maps, the 19 classes of Cityscapes."""

from slipstream.apps.street_scenes.dataset import StreetScenes, draw_street_scene

__all__ = ["StreetScenes", "draw_street_scene"]
