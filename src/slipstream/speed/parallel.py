"""Speed option: distributed training with replicas (DDP) or shards (FSDP2, HSDP) of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers import FullyShardedOptions
from slipstream.typecheck import check

__all__ = ["ParallelOptions", "read_model_wrapper", "read_parallel"]

_KINDS = ("ddp", "fsdp2", "hsdp")
_SHARDED = "MMFullyShardedDataParallel"


@dataclass(frozen=True)
class ParallelOptions:
    """Options of the model wrapper in a run with several processes.

    Attributes:
        kind: `ddp`, `fsdp2`, `hsdp`, or `custom` for a wrapper from the user config.
        wrapper: the wrapper's configuration, as in MMEngine's `model_wrapper_cfg`; the default `type` is DDP.
    """

    kind: str
    wrapper: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def sharded(self) -> bool:
        """Whether each process stores a shard of every weight."""
        return self.kind in ("fsdp2", "hsdp")


def read_parallel(value: Any) -> ParallelOptions | None:
    """Read `parallel`: one of 'ddp', 'fsdp2', 'hsdp', or `dict(type=..., ...)` with the wrapper's options.

    Raises:
        ConfigError: the value is not one of these, or an option of a sharded model is unknown or invalid.
    """
    if value is None or isinstance(value, ParallelOptions):
        return value
    spec = value if isinstance(value, Mapping) else {"type": value}
    kind, rest = spec.get("type"), {key: option for key, option in spec.items() if key != "type"}
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
        raise ConfigError(
            f"must be one of {_KINDS} or a dict whose 'type' is one of them, not {value!r}{hint}", "parallel"
        )
    if kind == "ddp":
        return ParallelOptions("ddp", rest)
    if kind == "hsdp":
        rest = {"shard_size": "machine", **rest}
    options(FullyShardedOptions, rest, "parallel")  # also check the options in runs with a single process
    return ParallelOptions(kind, {"type": _SHARDED, **rest})


def read_model_wrapper(cfg: Mapping[str, Any]) -> ParallelOptions | None:
    """Read MMEngine's `model_wrapper_cfg` from a Runner's `cfg`."""
    wrapper = check(cfg.get("model_wrapper_cfg"), Mapping | None, "model_wrapper_cfg")
    if wrapper is None:
        return None
    kind = wrapper.get("type", "MMDistributedDataParallel")
    check(kind, str | Callable[..., Any], "model_wrapper_cfg.type")
    name = (kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1]
    if name == _SHARDED:
        return ParallelOptions("hsdp" if wrapper.get("shard_size") else "fsdp2", wrapper)
    known = name in ("MMDistributedDataParallel", "DistributedDataParallel")
    return ParallelOptions("ddp" if known else "custom", wrapper)
