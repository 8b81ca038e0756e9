"""The three front ends: MMEngine's words and SuperGradients' words in those of `speed=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from slipstream.speed.parallel import read_model_wrapper

__all__ = ["Setting", "UserHook", "is_plain_wrapper", "read_front_ends", "settings"]

_LOWER = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
_REFUSED = ("efficient_conv_bn_eval",)
FrontEnd = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What one front end says about one option."""

    option: str
    place: str
    value: Any


@dataclass(frozen=True)
class UserHook:
    """A hook that the configuration brings itself, and that the Runner registers as it is."""

    hook: Any
    """Its configuration, or the hook."""

    def __repr__(self) -> str:
        return repr(self.hook)


def read_front_ends(
    speed: Any, cfg: FrontEnd, optim_wrapper: Any, custom_hooks: Any, env_cfg: Any, params: Any, device: str
) -> dict[str, FrontEnd]:
    """Return what stands behind each front end, by the name that begins its places.

    What is no option is checked by whoever reads it.

    Raises:
        ConfigError: `speed` or `training_params` is no dict, or `cfg` asks for what does not exist.
    """
    for word in _REFUSED:
        if cfg.get(word):
            raise ConfigError("this option is not available yet: remove it from cfg", word)
    if not isinstance(params, Mapping):
        raise ConfigError(f"must be a dict, not {params!r}", "training_params")
    return {
        "speed": _own_words(speed, "speed"),
        "cfg": cfg,
        "optim_wrapper": _wrapper_words(optim_wrapper, device),
        "custom_hooks": {"EMAHook": _ema_hook(custom_hooks)},
        "env_cfg": env_cfg if isinstance(env_cfg, Mapping) else {},
        "training_params": {**params, "device": device},
        "training_params.speed": _own_words(params.get("speed"), "training_params.speed"),
    }


def settings(words: Mapping[str, Sequence[str]], front_ends: Mapping[str, FrontEnd]) -> Iterator[Setting]:
    """Yield what the front ends say; `words` holds the places of each option (`cfg.compile`)."""
    for option, places in words.items():
        for place in places:
            front_end, _, key = place.rpartition(".")
            translate = _TRANSLATED.get(place)
            value = translate(front_ends[front_end]) if translate else front_ends[front_end].get(key)
            # None says nothing, except of the kernels: there it is a word.
            if value is not None or (option == "fused" and key in front_ends[front_end]):
                yield Setting(option, place, value)


def is_plain_wrapper(optim_wrapper: Any) -> bool:
    """Say whether `optim_wrapper` can still be told its precision, accumulation and clipping."""
    if isinstance(optim_wrapper, torch.optim.Optimizer):
        return True
    if not isinstance(optim_wrapper, Mapping) or not {"optimizer", "constructor"} & set(optim_wrapper):
        return False
    return _kind(optim_wrapper.get("type", "OptimWrapper")) in ("OptimWrapper", "AmpOptimWrapper")


def _own_words(speed: Any, place: str) -> FrontEnd:
    if speed is None:
        return {}
    if speed == "auto":
        return {"auto": True}
    if not isinstance(speed, Mapping):
        raise ConfigError(f"must be 'auto' or a dict of options, not {speed!r}", place)
    return speed


def _kind(kind: Any) -> str:
    """Return the name of a class that a configuration's `type` gives, without its scope."""
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).rsplit(".", 1)[-1]


def _wrapper_words(wrapper: Any, device: str) -> FrontEnd:
    """Return what an optimizer wrapper, ready or not, says about precision, accumulation and clipping."""
    if isinstance(wrapper, OptimWrapper) and not isinstance(wrapper, OptimWrapperDict):
        counts = wrapper.accumulative_counts
        # Not its property `dtype`, which would keep the device that the parameters are on before they are moved.
        dtype = _short(wrapper._requested_dtype, device) if isinstance(wrapper, AmpOptimWrapper) else None
        return {
            "dtype": dtype,
            "accumulative_counts": counts if counts > 1 else None,
            "clip_grad": wrapper.clip_grad,
        }
    if not is_plain_wrapper(wrapper) or not isinstance(wrapper, Mapping):
        return {}
    amp = _kind(wrapper.get("type")) == "AmpOptimWrapper"
    return {
        "dtype": _short(wrapper.get("dtype"), device) if amp else None,
        "accumulative_counts": wrapper.get("accumulative_counts"),
        "clip_grad": wrapper.get("clip_grad"),
    }


def _short(dtype: Any, device: str) -> str | None:
    """Return `fp16` or `bf16`; None is what autocast takes on this kind of device when nobody names a dtype."""
    return _LOWER.get(str(dtype or torch.get_autocast_dtype(device)).removeprefix("torch."))


def _ema_hook(hooks: Any) -> UserHook | None:
    for hook in hooks if isinstance(hooks, Sequence) else ():
        kind = hook.get("type") if isinstance(hook, Mapping) else type(hook)
        if _kind(kind) == "EMAHook":
            return UserHook(hook)
    return None


# ---- SuperGradients' training_params -------------------------------------------------------------------


def _mixed_precision(params: FrontEnd) -> Any:
    given = params.get("mixed_precision")
    if isinstance(given, bool):
        return _short(None, params["device"]) if given else "fp32"
    return given


def _torch_compile(params: FrontEnd) -> Any:
    if not params.get("torch_compile"):
        if params.get("torch_compile_loss"):
            raise ConfigError(
                "the loss is compiled as a part of the step: give torch_compile instead",
                "training_params.torch_compile_loss",
            )
        return params.get("torch_compile")
    options = {**(params.get("torch_compile_options") or {})}
    if options.pop("disable", False):
        return False
    mode = params.get("torch_compile_mode")
    if mode is not None and options.setdefault("mode", mode) != mode:
        raise ConfigError(
            f"is '{mode}', but torch_compile_options.mode is '{options['mode']}': give one of them",
            "training_params.torch_compile_mode",
        )
    return options or True


def _ema(params: FrontEnd) -> Any:
    if not params.get("ema"):
        return params.get("ema")
    given = dict(params.get("ema_params") or {})
    if "exp_activation" in given:  # its older word for the type
        exponential = given.pop("exp_activation")
        given.setdefault("decay_type", "exp" if exponential else "constant")
    if "decay_type" in given:
        given["type"] = given.pop("decay_type")
        if given["type"] != "exp":
            given.pop("beta", None)  # its defaults add one to every type
    return given or True


def _multi_gpu(params: FrontEnd) -> str | None:
    given = params.get("multi_gpu")
    word = str(given).rsplit(".", 1)[-1].upper()
    if given is None or word in ("OFF", "AUTO", "FALSE"):
        return None
    if word in ("DDP", "DISTRIBUTED_DATA_PARALLEL"):
        return "ddp"
    raise ConfigError(f"must be 'DDP' or 'Off', not {given!r}", "training_params.multi_gpu")


def _clip_grad_norm(params: FrontEnd) -> Any:
    limit = params.get("clip_grad_norm")
    return None if limit is None else {"max_norm": limit}


_TRANSLATED: Mapping[str, Callable[[FrontEnd], Any]] = {
    "cfg.model_wrapper_cfg": read_model_wrapper,
    "training_params.mixed_precision": _mixed_precision,
    "training_params.torch_compile": _torch_compile,
    "training_params.ema": _ema,
    "training_params.multi_gpu": _multi_gpu,
    "training_params.clip_grad_norm": _clip_grad_norm,
}
