"""StreetScenes: synthetic street images and label maps with the 19 Cityscapes classes."""

from slipstream.zoo.street_scenes.dataset import StreetScenes, draw_street_scene

__all__ = ["StreetScenes", "draw_street_scene"]
