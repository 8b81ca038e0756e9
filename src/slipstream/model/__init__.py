"""Base classes for models, data preprocessors, distributed wrappers and weight averages."""

from slipstream.model import averaged_model, base_module, data_preprocessor, sync_batchnorm
from slipstream.model.averaged_model import *  # noqa: F403
from slipstream.model.base_model import BaseModel
from slipstream.model.base_module import *  # noqa: F403
from slipstream.model.data_preprocessor import *  # noqa: F403
from slipstream.model.sync_batchnorm import *  # noqa: F403
from slipstream.model.tasks import Classifier, Segmentor, SlidingWindow, slide
from slipstream.model.wrappers import (
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    is_model_wrapper,
    unwrap_model,
)

__all__ = [
    "BaseModel", "Classifier", "MMDistributedDataParallel", "MMSeparateDistributedDataParallel", "Segmentor",
    "SlidingWindow", "is_model_wrapper", "slide", "unwrap_model",
]  # fmt: skip
__all__ += averaged_model.__all__
__all__ += base_module.__all__
__all__ += data_preprocessor.__all__
__all__ += sync_batchnorm.__all__
