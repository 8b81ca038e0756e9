"""`BaseModel` and data preprocessors."""

from slipstream.openmmlab.mmengine.model.base_model.base_model import BaseModel
from slipstream.openmmlab.mmengine.model.base_model.data_preprocessor import (
    BaseDataPreprocessor,
    ImgDataPreprocessor,
)

__all__ = ["BaseDataPreprocessor", "BaseModel", "ImgDataPreprocessor"]
