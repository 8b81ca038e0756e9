"""SuperGradients' optimizer keys: learning rates by the prefixes of names, no weight decay where none is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slipstream.errors import ConfigError, did_you_mean
from slipstream.optim import DefaultOptimWrapperConstructor
from slipstream.optim.constructor import NORMS
from slipstream.registry import OPTIM_WRAPPER_CONSTRUCTORS
from slipstream.training.params import TrainingParams
from slipstream.typecheck import matches

__all__ = ["PrefixOptimWrapperConstructor", "freeze", "optim_wrapper"]

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"weight_decay": 1e-4, "momentum": 0.9},
    "Adam": {"weight_decay": 1e-4},
    "RMSprop": {"weight_decay": 1e-4, "momentum": 0.9},
    "RMSpropTF": {"weight_decay": 1e-4, "momentum": 0.9},
}
"""What SuperGradients gives an optimizer unless `optimizer_params` say otherwise."""

_SPARED = "zero_weight_decay_on_bias_and_bn"


def optim_wrapper(params: TrainingParams) -> dict[str, Any]:
    """Return the `optim_wrapper` configuration; precision, accumulation and clipping are the plan's affair.

    Raises:
        ConfigError: no `initial_lr`, or one that is no learning rate; a key that an optimizer which is made already
            leaves no room for.
    """
    optimizer = params.optimizer
    if isinstance(optimizer, Optimizer):
        for key in ("initial_lr", "optimizer_params", "zero_weight_decay_on_bias_and_bn", "finetune"):
            if key in params.given():
                raise ConfigError("the optimizer is made already: leave this out", f"training_params.{key}")
        return {"optimizer": optimizer}
    if not isinstance(optimizer, str | type):
        raise ConfigError(
            f"must be a name, a class or an optimizer, not {optimizer!r}", "training_params.optimizer"
        )
    rates = _rates(params.initial_lr, "initial_lr")
    rules: dict[str, Any] = {"initial_lr": rates}
    if isinstance(params.warmup_initial_lr, Mapping):
        rules["warmup_initial_lr"] = _rates(params.warmup_initial_lr, "warmup_initial_lr")
        _check_same_prefixes(rules["warmup_initial_lr"], rates)
    if params.finetune:
        _check_finetune(params)
        rules["finetune"] = True
    if params.zero_weight_decay_on_bias_and_bn:
        rules[_SPARED] = True
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    own = {**_DEFAULTS.get(name, {}), **params.optimizer_params}
    return {
        "constructor": "PrefixOptimWrapperConstructor",
        "optimizer": {"type": optimizer, "lr": rates.get("default", max(rates.values())), **own},
        "paramwise_cfg": rules,
    }


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class PrefixOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Give each parameter the learning rate of the longest prefix that its name begins with.

    Names are those inside the model's `network`, if it has one; of the others, the model's own. Parameters of one
    learning rate and one decay share a group, whose `name` tells their prefixes. A rate of 0 keeps them as they are;
    `freeze` sees to it that they cost nothing.

    `paramwise_cfg` holds `initial_lr`, the learning rate of each prefix, and of `default`, for the rest;
    `warmup_initial_lr` alike, which the groups keep for the schedule; `finetune`, with which the network itself gives
    the rates: its `get_finetune_lr_dict(lr)`, lr being that of `default`; and `zero_weight_decay_on_bias_and_bn`,
    which takes the weight decay from all biases and all norm layers.

    Raises:
        ConfigError: when called: no name begins with a prefix, or a trainable parameter has none, and there is no
            `default`; or `finetune`, and the network has no such method.
    """

    def add_params(
        self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: bool = False
    ) -> None:
        """Append `{"params": [parameter], **its options}` for every parameter of the model."""
        rates = _rates_of(module, self.paramwise_cfg)
        starts: Mapping[str, float] = self.paramwise_cfg.get("warmup_initial_lr", {})
        spared = _biases_and_norms(module) if self.paramwise_cfg.get(_SPARED) else set()
        named = _named_parameters(module)
        if "finetune" not in self.paramwise_cfg:  # a network may name heads that it was built without
            _check_prefixes(rates, named)
        labels: dict[Any, list[str]] = {}
        for key, rate in rates.items():
            labels.setdefault((rate, starts.get(key)), []).append(key)
        for name, parameter in named.items():
            if not parameter.requires_grad:
                continue
            key = _prefix(name, rates)
            if key not in rates:
                raise ConfigError(
                    f"needs a 'default': no prefix is meant for '{name}'", "training_params.initial_lr"
                )
            rate, start = rates[key], starts.get(key)
            options: dict[str, Any] = {"lr": rate, "name": ", ".join(labels[rate, start])}
            if start is not None:
                options["warmup_initial_lr"] = start
            if id(parameter) in spared:
                options["weight_decay"] = 0.0
            params.append({"params": [parameter], **options})


def freeze(model: nn.Module, paramwise_cfg: Mapping[str, Any]) -> None:
    """Take the gradient from all parameters to which a `PrefixOptimWrapperConstructor` would give the rate 0.

    To be called before the model is wrapped for several processes. As in SuperGradients, the frozen parts' BatchNorm
    statistics go on following the data.

    Args:
        model: holds the user's network as `network`.
        paramwise_cfg: that of the constructor.

    Raises:
        ConfigError: see the constructor.
    """
    rates = _rates_of(model, paramwise_cfg)
    for name, parameter in _named_parameters(model).items():
        if rates.get(_prefix(name, rates)) == 0:
            parameter.requires_grad_(False)


def _rates_of(model: nn.Module, rules: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the learning rates by prefix: those that are given, or those by which the network is fine-tuned."""
    rates: Mapping[str, float] = rules["initial_lr"]
    if not rules.get("finetune"):
        return rates
    network: Any = getattr(model, "network", model)
    if not hasattr(network, "get_finetune_lr_dict"):
        raise ConfigError(
            f"{type(network).__name__} does not say what to fine-tune: give it a method get_finetune_lr_dict(lr) that "
            "returns {'head': lr, 'default': 0}, or give initial_lr as such a map",
            "training_params.finetune",
        )
    return _rates(network.get_finetune_lr_dict(rates["default"]), "finetune")


def _check_finetune(params: TrainingParams) -> None:
    for key in ("initial_lr", "warmup_initial_lr"):
        if isinstance(getattr(params, key), Mapping):
            raise ConfigError(
                "must be a number with finetune, which lets the network say what learns",
                f"training_params.{key}",
            )


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have in the user's network; each once, by its first name."""
    network = getattr(model, "network", None)
    inside = "network." if isinstance(network, nn.Module) else ""
    return {name.removeprefix(inside): parameter for name, parameter in model.named_parameters()}


def _biases_and_norms(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that SuperGradients lets go without weight decay."""
    parts = ((part, part.named_parameters(recurse=False)) for part in model.modules())
    return {id(p) for part, named in parts for name, p in named if name == "bias" or isinstance(part, NORMS)}


def _prefix(name: str, rates: Iterable[str]) -> str:
    """Return the longest prefix of `name` among the keys, else `default`."""
    return max(
        (key for key in rates if key != "default" and name.startswith(key)), key=len, default="default"
    )


def _check_prefixes(rates: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for key in rates:
        if key != "default" and not any(name.startswith(key) for name in names):
            known = {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}
            raise ConfigError(
                f"no parameter's name begins with '{key}'{did_you_mean(key, known)}",
                "training_params.initial_lr",
            )


def _check_same_prefixes(starts: Iterable[str], rates: Iterable[str]) -> None:
    place = "training_params.warmup_initial_lr"
    for key in starts:
        if key not in rates:
            raise ConfigError(f"'{key}' is not in initial_lr{did_you_mean(key, rates)}", place)
    for key in rates:
        if key not in starts:
            raise ConfigError(f"does not say where '{key}' starts", place)


def _rates(given: Any, key: str) -> dict[str, float]:
    """Return the learning rates by prefix; a number is for all."""
    place = f"training_params.{key}"
    if given is None or given == {}:
        raise ConfigError("is needed: a number, or a map of name prefixes and 'default'", place)
    rates = dict(given) if isinstance(given, Mapping) else {"default": given}
    for prefix, rate in rates.items():
        if not matches(rate, float) or not 0 <= rate < math.inf:
            raise ConfigError(f"must be a number of at least 0, not {rate!r}", f"{place}.{prefix}")
    return rates
