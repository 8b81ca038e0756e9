"""Base classes for models, and weight initialization."""

from slipstream.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.openmmlab.mmengine.model.base_model import (
    BaseDataPreprocessor,
    BaseModel,
    ImgDataPreprocessor,
)
from slipstream.openmmlab.mmengine.model.base_module import BaseModule, ModuleDict, ModuleList, Sequential
from slipstream.openmmlab.mmengine.model.test_time_aug import BaseTTAModel
from slipstream.openmmlab.mmengine.model.utils import (
    convert_sync_batchnorm,
    detect_anomalous_params,
    merge_dict,
    revert_sync_batchnorm,
    stack_batch,
)
from slipstream.openmmlab.mmengine.model.weight_init import (
    Caffe2XavierInit,
    ConstantInit,
    KaimingInit,
    NormalInit,
    PretrainedInit,
    TruncNormalInit,
    UniformInit,
    XavierInit,
    bias_init_with_prob,
    caffe2_xavier_init,
    constant_init,
    initialize,
    kaiming_init,
    normal_init,
    trunc_normal_init,
    uniform_init,
    xavier_init,
)
from slipstream.openmmlab.mmengine.model.wrappers import is_model_wrapper

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BaseModule",
    "BaseTTAModel",
    "Caffe2XavierInit",
    "ConstantInit",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "KaimingInit",
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "ModuleDict",
    "ModuleList",
    "MomentumAnnealingEMA",
    "NormalInit",
    "PretrainedInit",
    "Sequential",
    "StochasticWeightAverage",
    "TruncNormalInit",
    "UniformInit",
    "XavierInit",
    "bias_init_with_prob",
    "caffe2_xavier_init",
    "constant_init",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "initialize",
    "is_model_wrapper",
    "kaiming_init",
    "merge_dict",
    "normal_init",
    "revert_sync_batchnorm",
    "stack_batch",
    "trunc_normal_init",
    "uniform_init",
    "xavier_init",
]
