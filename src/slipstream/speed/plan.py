"""Which levers a run uses, read from the words of a configuration into one typed plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers import FullyShardedOptions
from slipstream.speed.compile import CompileOptions, read_compile

__all__ = ["CFG_LEVERS", "SpeedPlan"]

CFG_LEVERS = ("compile", "sync_bn", "parallel", "model_wrapper_cfg", "find_unused_parameters")
"""The keys that a Runner reads from its `cfg` alone."""
_KINDS = ("ddp", "fsdp2", "hsdp")


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
            model_wrapper=_read_wrapper(cfg),
            find_unused_parameters=bool(cfg.get("find_unused_parameters", False)),
        )


def _read_wrapper(cfg: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what `parallel` means in the words of `model_wrapper_cfg`, or `model_wrapper_cfg` itself."""
    given: Mapping[str, Any] | None = cfg.get("model_wrapper_cfg")
    parallel = cfg.get("parallel")
    if parallel is None:
        return given
    if given is not None:
        raise ConfigError("give parallel or model_wrapper_cfg, not both", "parallel")
    how = {"type": parallel} if isinstance(parallel, str) else parallel
    if not isinstance(how, Mapping) or not isinstance(how.get("type"), str):
        raise ConfigError(f"must be a name or a dict with a 'type' of {_KINDS}, not {parallel!r}", "parallel")
    kind, rest = how["type"], {key: value for key, value in how.items() if key != "type"}
    if kind not in _KINDS:
        raise ConfigError(f"must be one of {_KINDS}, not {kind!r}{did_you_mean(kind, _KINDS)}", "parallel")
    if kind == "ddp":
        return rest
    if kind == "hsdp":
        rest = {"shard_size": "machine", **rest}
    options(FullyShardedOptions, rest, "parallel")  # a mistake is found on one process, too
    return {"type": "MMFullyShardedDataParallel", **rest}
