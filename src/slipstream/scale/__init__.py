"""Scale on paper: what a training step takes on 8 to 4,096 GPUs, before anyone rents them (docs/scaling.md)."""

from slipstream.scale.describe import describe
from slipstream.scale.facts import Block, Cluster, Gamma, Kind, Link, Model, Prediction, Strategy
from slipstream.scale.predict import best, predict
from slipstream.scale.presets import GPUS, NETWORKS, Gpu, Network, make_cluster, segformer_1b
from slipstream.scale.simulate import simulate

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
