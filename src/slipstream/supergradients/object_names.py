"""SuperGradients' names for networks and losses, and its enums."""

from __future__ import annotations

from enum import Enum, StrEnum

from slipstream.errors import SlipstreamError
from slipstream.zoo import models
from slipstream.zoo.network_names import TIMM_REMEDY, network_hint

__all__ = ["Losses", "Models", "MultiGPUMode", "StrictLoad"]


class MissingNetworkError(SlipstreamError, AttributeError):
    """`Models` has no network with this name."""


class _Networks(type):
    """Metaclass that provides the names of all networks as uppercase attributes."""

    def __getattr__(cls, name: str) -> str:
        known = {network.upper(): network for network in models.names()}
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in known:
            raise MissingNetworkError(
                f"Models.{name} is not one of Slipstream's networks{network_hint(name, models.names())} "
                f"(available: {', '.join(sorted(known))}; {TIMM_REMEDY}); your own networks can be passed to "
                "Trainer.train"
            )
        return known[name]

    def __dir__(cls) -> list[str]:
        return [network.upper() for network in models.names()]


class Models(metaclass=_Networks):
    """Network names for `models.get`: `Models.DDRNET_23` is `'ddrnet_23'`.

    Raises:
        MissingNetworkError: if an accessed attribute does not name one of Slipstream's networks.
    """


class Losses:
    """Loss names for `training_params['loss']`."""

    BCE_DICE_LOSS = "BCEDiceLoss"
    CROSS_ENTROPY = "CrossEntropyLoss"
    DICE_CE_EDGE_LOSS = "DiceCEEdgeLoss"
    KD_LOSS = "KDLogitsLoss"
    MSE = "MSE"
    SHELFNET_OHEM_LOSS = "ShelfNetOHEMLoss"
    STDC_LOSS = "STDCLoss"


class StrictLoad(Enum):
    """How strictly the tensor names in a checkpoint must match those of the network."""

    OFF = False
    ON = True
    NO_KEY_MATCHING = "no_key_matching"
    KEY_MATCHING = "key_matching"


class MultiGPUMode(StrEnum):
    """How a script uses multiple devices."""

    OFF = "Off"
    DATA_PARALLEL = "DP"
    DISTRIBUTED_DATA_PARALLEL = "DDP"
    AUTO = "AUTO"
