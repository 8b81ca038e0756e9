"""Translate the keys of the three front ends (MMEngine, SuperGradients, `speed=`) into `SpeedPlan` options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from slipstream.speed.parallel import read_model_wrapper
from slipstream.typecheck import check

__all__ = ["CFG_OPTIONS", "PARAMS_OPTIONS", "Setting", "UserHook", "is_plain_wrapper", "read_settings"]

_SHORT_NAMES = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
_UNSUPPORTED = "efficient_conv_bn_eval"
FrontEnd = Mapping[str, Any]
_PATHS = {
    "precision": ("optim_wrapper.dtype", "training_params.mixed_precision"),
    "compile": ("cfg.compile", "training_params.torch_compile"),
    "ema": ("custom_hooks.EMAHook", "training_params.ema"),
    "sync_bn": ("cfg.sync_bn", "training_params.sync_bn"),
    "parallel": ("cfg.parallel", "cfg.model_wrapper_cfg", "training_params.multi_gpu"),
    "find_unused_parameters": ("cfg.find_unused_parameters",),
    "accumulate": ("optim_wrapper.accumulative_counts", "training_params.batch_accumulate"),
    "clip_grad": ("optim_wrapper.clip_grad", "training_params.clip_grad_norm"),
    "activation_checkpointing": ("cfg.activation_checkpointing",),
    "cudnn_benchmark": ("env_cfg.cudnn_benchmark",),
}
"""The config paths of options, in addition to `speed=`."""


def _keys(front_end: str) -> list[str]:
    """Return the keys of a front end that set options."""
    paths = (path.rpartition(".") for option_paths in _PATHS.values() for path in option_paths)
    return [key for prefix, _, key in paths if prefix == front_end]


CFG_OPTIONS = (*_keys("cfg"), "training_params")
"""The keys of options that a Runner reads only from its `cfg`."""
_MORE_PARAMS = ("speed", "torch_compile_loss", "torch_compile_options", "torch_compile_mode", "ema_params")
PARAMS_OPTIONS = (*_keys("training_params"), *_MORE_PARAMS)
"""The keys of SuperGradients' `training_params` that set speed options."""


class Setting(NamedTuple):
    """The value of one option in one front end."""

    option: str
    path: str
    value: Any


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
    cfg: FrontEnd | None,
    optim_wrapper: Any,
    custom_hooks: Any,
    env_cfg: Any,
    params: Any,
    device: str,
) -> Iterator[Setting]:
    """Yield the settings of all front ends, ordered by option.

    Keys that are not options are checked only in `speed`.

    Raises:
        ConfigError: `speed` is neither 'auto' nor a dict of options, `training_params` is not a dict, or `cfg` sets an
            unsupported option.
    """
    if cfg is not None and cfg.get(_UNSUPPORTED):
        raise ConfigError("this option is not supported yet; remove it from cfg", _UNSUPPORTED)
    params = {} if params is None else check(params, Mapping, "training_params")
    front_ends: Mapping[str, FrontEnd] = {
        "speed": _speed_keys(speed, "speed", options),
        "cfg": cfg or {},
        "optim_wrapper": _wrapper_keys(optim_wrapper, device),
        "custom_hooks": {"EMAHook": _ema_hook(custom_hooks)},
        "env_cfg": env_cfg if isinstance(env_cfg, Mapping) else {},
        "training_params": {**params, "device": device},
        "training_params.speed": _speed_keys(params.get("speed"), "training_params.speed", options),
    }
    for option in options:
        for path in (f"speed.{option}", *_PATHS.get(option, ()), f"training_params.speed.{option}"):
            front_end, _, key = path.rpartition(".")
            keys, translate = front_ends[front_end], _TRANSLATIONS.get(path)
            value = translate(keys) if translate else keys.get(key)
            # None means that the option is not set, except for `fused`, for which None is a value.
            if value is not None or (option == "fused" and key in keys):
                yield Setting(option, path, value)


def is_plain_wrapper(optim_wrapper: Any) -> bool:
    """Return whether the precision, accumulation and clipping options of `optim_wrapper` can still be set."""
    if isinstance(optim_wrapper, torch.optim.Optimizer):
        return True
    if not isinstance(optim_wrapper, Mapping) or not {"optimizer", "constructor"} & set(optim_wrapper):
        return False
    return _kind(optim_wrapper.get("type", "OptimWrapper")) in ("OptimWrapper", "AmpOptimWrapper")


def _speed_keys(speed: Any, path: str, options: Sequence[str]) -> FrontEnd:
    if speed is None:
        return {}
    if speed == "auto":
        return {"auto": True}
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


def _wrapper_keys(wrapper: Any, device: str) -> FrontEnd:
    """Return the precision, accumulation and clipping options of an optimizer wrapper or its configuration."""
    if isinstance(wrapper, OptimWrapper) and not isinstance(wrapper, OptimWrapperDict):
        amp, counts = isinstance(wrapper, AmpOptimWrapper), wrapper.accumulative_counts
        # Do not read the property `dtype`: it caches the device type of the parameters, which are moved later.
        keys = {
            "dtype": wrapper._requested_dtype if isinstance(wrapper, AmpOptimWrapper) else None,
            "accumulative_counts": counts if counts > 1 else None,
            "clip_grad": wrapper.clip_grad,
        }
    elif is_plain_wrapper(wrapper) and isinstance(wrapper, Mapping):
        amp = _kind(wrapper.get("type")) == "AmpOptimWrapper"
        keys = {name: wrapper.get(name) for name in ("dtype", "accumulative_counts", "clip_grad")}
    else:
        return {}
    return {**keys, "dtype": _short_name(keys["dtype"], device) if amp else None}


def _short_name(dtype: Any, device: str) -> str | None:
    """Return the short name of a dtype, such as `bf16`, or None if the dtype has no short name.

    If `dtype` is None, autocast's default dtype on this device type is used.
    """
    return _SHORT_NAMES.get(str(dtype or torch.get_autocast_dtype(device)).removeprefix("torch."))


def _ema_hook(hooks: Any) -> UserHook | None:
    for hook in hooks if isinstance(hooks, Sequence) else ():
        kind = hook.get("type") if isinstance(hook, Mapping) else type(hook)
        if _kind(kind) == "EMAHook":
            return UserHook(hook)
    return None


# ---- SuperGradients' training_params -------------------------------------------------------------------


def _mixed_precision(params: FrontEnd) -> Any:
    value = params.get("mixed_precision")
    if isinstance(value, bool):
        return _short_name(None, params["device"]) if value else "fp32"
    return value


def _torch_compile(params: FrontEnd) -> Any:
    if not params.get("torch_compile"):
        if params.get("torch_compile_loss"):
            raise ConfigError(
                "the loss is compiled as part of the step; set torch_compile instead",
                "training_params.torch_compile_loss",
            )
        return params.get("torch_compile")
    options = {**(params.get("torch_compile_options") or {})}
    if options.pop("disable", False):
        return False
    mode = params.get("torch_compile_mode")
    if mode is not None and options.setdefault("mode", mode) != mode:
        raise ConfigError(
            f"is '{mode}', but torch_compile_options.mode is '{options['mode']}'; remove one of them",
            "training_params.torch_compile_mode",
        )
    return options or True


def _ema(params: FrontEnd) -> Any:
    if not params.get("ema"):
        return params.get("ema")
    ema = dict(params.get("ema_params") or {})
    if "exp_activation" in ema:  # older versions of SuperGradients use this key
        exponential = ema.pop("exp_activation")
        ema.setdefault("decay_type", "exp" if exponential else "constant")
    if "decay_type" in ema:
        ema["type"] = ema.pop("decay_type")
        if ema["type"] != "exp":
            ema.pop("beta", None)  # SuperGradients' defaults set beta for every type
    return {**ema, "count": "batches"}


def _multi_gpu(params: FrontEnd) -> str | None:
    value = params.get("multi_gpu")
    name = str(value).rsplit(".", 1)[-1].upper()
    if value is None or name in ("OFF", "AUTO", "FALSE"):
        return None
    if name in ("DDP", "DISTRIBUTED_DATA_PARALLEL"):
        return "ddp"
    raise ConfigError(f"must be 'DDP' or 'Off', not {value!r}", "training_params.multi_gpu")


def _clip_grad_norm(params: FrontEnd) -> Any:
    limit = params.get("clip_grad_norm")
    return None if limit is None else {"max_norm": limit}


_TRANSLATIONS: Mapping[str, Callable[[FrontEnd], Any]] = {
    "cfg.model_wrapper_cfg": read_model_wrapper,
    "training_params.mixed_precision": _mixed_precision,
    "training_params.torch_compile": _torch_compile,
    "training_params.ema": _ema,
    "training_params.multi_gpu": _multi_gpu,
    "training_params.clip_grad_norm": _clip_grad_norm,
}
