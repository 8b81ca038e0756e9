"""The Runner and its loops."""

from slipstream.runner.environment import set_random_seed
from slipstream.runner.log_processor import LogProcessor
from slipstream.runner.loops import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    TestLoop,
    ValLoop,
)
from slipstream.runner.runner import Runner

__all__ = [
    "BaseLoop", "EpochBasedTrainLoop", "IterBasedTrainLoop", "LogProcessor", "Runner", "TestLoop", "ValLoop",
    "set_random_seed",
]  # fmt: skip
