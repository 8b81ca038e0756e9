"""Translate the keys of the three front ends (MMEngine, SuperGradients, `speed=`) into `SpeedPlan` options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from slipstream.speed.parallel import read_model_wrapper
from slipstream.typecheck import check

__all__ = ["CFG_OPTIONS", "PARAMS_OPTIONS", "UserHook", "is_plain_wrapper", "read_settings"]

_SHORT_NAMES = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
_UNSUPPORTED = "efficient_conv_bn_eval"

# The option that each key of a front end sets.
_CFG_KEYS = {
    "compile": "compile", "sync_bn": "sync_bn", "parallel": "parallel", "model_wrapper_cfg": "parallel",
    "find_unused_parameters": "find_unused_parameters", "activation_checkpointing": "activation_checkpointing",
}  # fmt: skip
_WRAPPER_KEYS = {"dtype": "precision", "accumulative_counts": "accumulate", "clip_grad": "clip_grad"}
_PARAMS_KEYS = {
    "mixed_precision": "precision", "torch_compile": "compile", "ema": "ema", "sync_bn": "sync_bn",
    "multi_gpu": "parallel", "batch_accumulate": "accumulate", "clip_grad_norm": "clip_grad",
}  # fmt: skip

CFG_OPTIONS = (*_CFG_KEYS, "training_params")
"""The keys of options that a Runner reads only from its `cfg`."""
_MORE_PARAMS = ("speed", "torch_compile_loss", "torch_compile_options", "torch_compile_mode", "ema_params")
PARAMS_OPTIONS = (*_PARAMS_KEYS, *_MORE_PARAMS)
"""The keys of SuperGradients' `training_params` that set speed options."""


@dataclass(frozen=True)
class UserHook:
    """A hook from the user config that the Runner registers unchanged."""

    hook: Any
    """The hook or its configuration."""

    def __repr__(self) -> str:
        return repr(self.hook)


def read_settings(
    options: Sequence[str],
    speed: Any,
    cfg: Mapping[str, Any] | None,
    optim_wrapper: Any,
    custom_hooks: Any,
    env_cfg: Any,
    params: Any,
    device: str,
) -> Iterator[tuple[str, str, Any]]:
    """Yield the option, the config path and the value of each setting of all front ends.

    Keys that are not options are checked only in `speed`.

    Raises:
        ConfigError: `speed` is neither 'auto' nor a dict of options, `training_params` is not a dict, or `cfg` sets an
            unsupported option.
    """
    cfg, env_cfg = cfg or {}, env_cfg if isinstance(env_cfg, Mapping) else {}
    if cfg.get(_UNSUPPORTED):
        raise ConfigError("this option is not supported yet; remove it from cfg", _UNSUPPORTED)
    params = {} if params is None else check(params, Mapping, "training_params")
    sync_bn = cfg.get("sync_bn") == "torch" or cfg.get("sync_bn")  # MMEngine's 'torch' is the same as True
    own_cfg = {**cfg, "sync_bn": sync_bn, "model_wrapper_cfg": read_model_wrapper(cfg)}
    more_speed = _speed_keys(params.get("speed"), "training_params.speed", options)
    own_names = dict(zip(options, options, strict=True))
    for prefix, keys, values in (
        ("speed.", own_names, _speed_keys(speed, "speed", options)),
        ("", _CFG_KEYS, own_cfg),  # the keys of `cfg` are at the top level of a configuration
        ("optim_wrapper.", _WRAPPER_KEYS, _wrapper_keys(optim_wrapper, device)),
        ("custom_hooks.", {"EMAHook": "ema"}, {"EMAHook": _ema_hook(custom_hooks)}),
        ("env_cfg.", {"cudnn_benchmark": "cudnn_benchmark"}, env_cfg),
        ("training_params.", _PARAMS_KEYS, _params_keys(params, device)),
        ("training_params.speed.", own_names, more_speed),
    ):
        for key, option in keys.items():
            # None means that the option is not set, except for `fused`, for which None is a value.
            if values.get(key) is not None or (option == "fused" and key in values):
                yield option, f"{prefix}{key}", values[key]


def is_plain_wrapper(optim_wrapper: Any) -> bool:
    """Return whether the precision, accumulation and clipping options of `optim_wrapper` can still be set."""
    if isinstance(optim_wrapper, torch.optim.Optimizer):
        return True
    if not isinstance(optim_wrapper, Mapping) or not {"optimizer", "constructor"} & set(optim_wrapper):
        return False
    return _kind(optim_wrapper.get("type", "OptimWrapper")) in ("OptimWrapper", "AmpOptimWrapper")


def _speed_keys(speed: Any, path: str, options: Sequence[str]) -> Mapping[str, Any]:
    if speed is None or speed == "auto":
        return {"auto": True} if speed else {}
    if is_dataclass(speed) and not isinstance(speed, type):  # a SpeedPlan
        values = {field.name: getattr(speed, field.name) for field in fields(speed) if field.compare}
        return {name: value for name, value in values.items() if value is not None}
    if not isinstance(speed, Mapping):
        raise ConfigError(
            f"must be 'auto' or a dict of options, not {speed!r}; set a single option by its name, as in "
            f"{path}.compile=True on the command line",
            path,
        )
    for key in speed:
        if key not in options:
            hint = did_you_mean(str(key), options, f"{path}.{key}")
            raise UnknownNameError(f"no such option{hint}", f"{path}.{key}")
    return speed


def _kind(kind: Any) -> str:
    """Return the class name in a configuration's `type`, without the scope."""
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rsplit(".", 1)[-1]


def _wrapper_keys(wrapper: Any, device: str) -> Mapping[str, Any]:
    """Return the precision, accumulation and clipping options of an optimizer wrapper or its configuration."""
    if isinstance(wrapper, OptimWrapper) and not isinstance(wrapper, OptimWrapperDict):
        amp, counts = isinstance(wrapper, AmpOptimWrapper), wrapper.accumulative_counts
        # Do not read the property `dtype`: it caches the device type of the parameters, which are moved later.
        dtype = wrapper._requested_dtype if isinstance(wrapper, AmpOptimWrapper) else None
        keys = {"accumulative_counts": counts if counts > 1 else None, "clip_grad": wrapper.clip_grad}
    elif is_plain_wrapper(wrapper) and isinstance(wrapper, Mapping):
        amp, dtype, keys = _kind(wrapper.get("type")) == "AmpOptimWrapper", wrapper.get("dtype"), {**wrapper}
    else:
        return {}
    return {**keys, "dtype": _short_name(dtype, device) if amp else None}


def _short_name(dtype: Any, device: str) -> str | None:
    """Return the short name of a dtype, such as `bf16`, or None if the dtype has no short name.

    If `dtype` is None, autocast's default dtype on this device type is used.
    """
    return _SHORT_NAMES.get(str(dtype or torch.get_autocast_dtype(device)).removeprefix("torch."))


def _ema_hook(hooks: Any) -> UserHook | None:
    for hook in hooks if isinstance(hooks, Sequence) else ():
        if _kind(hook.get("type") if isinstance(hook, Mapping) else type(hook)) == "EMAHook":
            return UserHook(hook)
    return None


def _params_keys(params: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    """Return the keys of SuperGradients' `training_params`, with the values of the options that they set."""
    path, keys = "training_params.", dict(params)
    if isinstance(params.get("mixed_precision"), bool):
        keys["mixed_precision"] = _short_name(None, device) if params["mixed_precision"] else "fp32"
    if params.get("torch_compile"):
        options = {"mode": params.get("torch_compile_mode"), **(params.get("torch_compile_options") or {})}
        keys["torch_compile"] = False if options.pop("disable", False) else options
    elif params.get("torch_compile_loss"):
        message = "the loss is compiled as part of the step; set torch_compile instead"
        raise ConfigError(message, f"{path}torch_compile_loss")
    if params.get("ema"):
        ema = dict(params.get("ema_params") or {})
        if "exp_activation" in ema:  # older versions of SuperGradients use this key
            ema.setdefault("decay_type", "exp" if ema.pop("exp_activation") else "constant")
        if "decay_type" in ema:
            ema["type"] = ema.pop("decay_type")
            if ema["type"] != "exp":
                ema.pop("beta", None)  # SuperGradients' defaults set beta for every type
        keys["ema"] = {**ema, "count": "batches"}
    name = str(params.get("multi_gpu")).rsplit(".", 1)[-1].upper()
    keys["multi_gpu"] = "ddp" if name in ("DDP", "DISTRIBUTED_DATA_PARALLEL") else None
    if keys["multi_gpu"] is None and name not in ("NONE", "OFF", "AUTO", "FALSE"):
        raise ConfigError(f"must be 'DDP' or 'Off', not {params['multi_gpu']!r}", f"{path}multi_gpu")
    if params.get("clip_grad_norm") is not None:
        keys["clip_grad_norm"] = {"max_norm": params["clip_grad_norm"]}
    return keys
