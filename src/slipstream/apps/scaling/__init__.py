"""A performance model of distributed training, which predicts step times on 8 to 4,096 GPUs (docs/scaling.md)."""

from slipstream.apps.scaling.describe import describe
from slipstream.apps.scaling.model_profile import (
    Block,
    Cluster,
    Gamma,
    Kind,
    Link,
    Model,
    Prediction,
    Strategy,
)
from slipstream.apps.scaling.predict import best, predict
from slipstream.apps.scaling.presets import GPUS, NETWORKS, Gpu, Network, make_cluster, segformer_1b
from slipstream.apps.scaling.simulate import simulate

__all__ = [
    "GPUS",
    "NETWORKS",
    "Block",
    "Cluster",
    "Gamma",
    "Gpu",
    "Kind",
    "Link",
    "Model",
    "Network",
    "Prediction",
    "Strategy",
    "best",
    "describe",
    "make_cluster",
    "predict",
    "segformer_1b",
    "simulate",
]
