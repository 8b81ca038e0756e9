"""Which levers a run uses, read from the words of a configuration into one typed plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.speed.compile import CompileOptions, read_compile

__all__ = ["CFG_LEVERS", "SpeedPlan"]

CFG_LEVERS = ("compile", "sync_bn", "model_wrapper_cfg", "find_unused_parameters")
"""The keys that a Runner reads from its `cfg` alone."""


@dataclass(frozen=True)
class SpeedPlan:
    """The levers of a run that concern its model; precision, accumulation and clipping are the optimizer wrapper's."""

    compile: CompileOptions | None = None
    """How the model is compiled, or None."""
    sync_bn: Literal["torch"] | None = None
    """BatchNorm statistics over all ranks."""
    model_wrapper: Mapping[str, Any] | None = None
    """What wraps the model when there are several processes; None is `MMDistributedDataParallel`."""
    find_unused_parameters: bool = False
    """DDP looks for parameters without gradient in each step; slower."""

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any]) -> SpeedPlan:
        """Read MMEngine's words from a Runner's `cfg`.

        Raises:
            ConfigError: a lever has a wrong value, or one that this version does not have.
        """
        for absent in ("activation_checkpointing", "efficient_conv_bn_eval"):
            if cfg.get(absent):
                raise ConfigError("this lever is not available yet: remove it from cfg", absent)
        sync_bn = cfg.get("sync_bn")
        if sync_bn not in (None, False, True, "torch"):
            raise ConfigError(f"must be 'torch' (or True), not {sync_bn!r}", "sync_bn")
        return cls(
            compile=read_compile(cfg.get("compile")),
            sync_bn="torch" if sync_bn else None,
            model_wrapper=cfg.get("model_wrapper_cfg"),
            find_unused_parameters=bool(cfg.get("find_unused_parameters", False)),
        )
