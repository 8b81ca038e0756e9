"""Base classes for models, data preprocessors, distributed wrappers and weight averages."""

from slipstream.model.averaged_model import (
    BaseAveragedModel,
    DecaySchedule,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    ScheduledEMA,
    StochasticWeightAverage,
)
from slipstream.model.base_model import BaseModel
from slipstream.model.base_module import BaseModule, ModuleDict, ModuleList, Sequential
from slipstream.model.data_preprocessor import BaseDataPreprocessor, ImgDataPreprocessor
from slipstream.model.sliding import SlidingWindow, slide
from slipstream.model.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from slipstream.model.tasks import Classifier, Segmentor
from slipstream.model.wrappers import (
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    is_model_wrapper,
    unwrap_model,
)

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BaseModule",
    "Classifier",
    "DecaySchedule",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "MMDistributedDataParallel",
    "MMSeparateDistributedDataParallel",
    "ModuleDict",
    "ModuleList",
    "MomentumAnnealingEMA",
    "ScheduledEMA",
    "Segmentor",
    "Sequential",
    "SlidingWindow",
    "StochasticWeightAverage",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "is_model_wrapper",
    "revert_sync_batchnorm",
    "slide",
    "unwrap_model",
]
