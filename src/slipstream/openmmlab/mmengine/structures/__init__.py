"""Containers for the annotations and predictions of a sample."""

from slipstream.openmmlab.mmengine.structures.base_data_element import BaseDataElement
from slipstream.openmmlab.mmengine.structures.instance_data import InstanceData
from slipstream.openmmlab.mmengine.structures.label_data import LabelData
from slipstream.openmmlab.mmengine.structures.pixel_data import PixelData

__all__ = ["BaseDataElement", "InstanceData", "LabelData", "PixelData"]
