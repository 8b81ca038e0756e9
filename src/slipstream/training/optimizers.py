"""SuperGradients' optimizer keys: learning rates by name prefix, and no weight decay for biases or norm layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slipstream.errors import ConfigError, did_you_mean
from slipstream.optim import DefaultOptimWrapperConstructor
from slipstream.optim.constructor import NORMS
from slipstream.registry import OPTIM_WRAPPER_CONSTRUCTORS
from slipstream.training.params import TrainingParams
from slipstream.typecheck import matches

# SuperGradients' default optimizer arguments. `optimizer_params` overrides them.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"weight_decay": 1e-4, "momentum": 0.9},
    "Adam": {"weight_decay": 1e-4},
    "RMSprop": {"weight_decay": 1e-4, "momentum": 0.9},
    "RMSpropTF": {"weight_decay": 1e-4, "momentum": 0.9},
}
_INITIAL = "training_params.initial_lr"
_NO_DECAY = "zero_weight_decay_on_bias_and_bn"


def optim_wrapper(params: TrainingParams) -> dict[str, Any]:
    """Return the `optim_wrapper` configuration without precision, accumulation or clipping, which `SpeedPlan` sets.

    Raises:
        ConfigError: if `initial_lr` is missing or invalid, or a key does not apply to an optimizer object.
    """
    optimizer = params.optimizer
    if isinstance(optimizer, Optimizer):
        for key in ("initial_lr", "optimizer_params", _NO_DECAY, "finetune"):
            if key in params.changed():
                raise ConfigError("does not apply to an optimizer object", f"training_params.{key}")
        return {"optimizer": optimizer}
    if not isinstance(optimizer, str | type):
        raise ConfigError(f"must be a name or an optimizer, not {optimizer!r}", "training_params.optimizer")
    rates = _rates(params.initial_lr, "initial_lr")
    rules: dict[str, Any] = {"initial_lr": rates}
    if isinstance(params.warmup_initial_lr, Mapping):
        rules["warmup_initial_lr"] = _rates(params.warmup_initial_lr, "warmup_initial_lr")
        if rules["warmup_initial_lr"].keys() != rates.keys():
            raise ConfigError(f"must have the keys {[*rates]}", "training_params.warmup_initial_lr")
    if params.finetune:
        for key in ("initial_lr", "warmup_initial_lr"):
            if isinstance(getattr(params, key), Mapping):
                raise ConfigError("must be a number if finetune is set", f"training_params.{key}")
        rules["finetune"] = True
    if params.zero_weight_decay_on_bias_and_bn:
        rules[_NO_DECAY] = True
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    own = {**_DEFAULTS.get(name, {}), **params.optimizer_params}
    return {
        "constructor": "PrefixOptimWrapperConstructor",
        "optimizer": {"type": optimizer, "lr": rates.get("default", max(rates.values())), **own},
        "paramwise_cfg": rules,
    }


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class PrefixOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Set the learning rate of each parameter according to the longest prefix that matches its name.

    Names are relative to the model's `network`, if it has one. Parameters with the same learning rate and weight decay
    share a group, whose `name` lists their prefixes. Parameters with a learning rate of 0 are not updated;
    `freeze` also disables their gradients.

    The `initial_lr` key of `paramwise_cfg` is a dict that maps each prefix to its learning rate; its `default` entry
    applies to all other parameters. The value of `warmup_initial_lr` has the same form and is stored in the parameter
    groups for the schedule. With `finetune`, the network's `get_finetune_lr_dict(lr)` method returns the rates, where
    `lr` is the `default` rate. The `zero_weight_decay_on_bias_and_bn` key disables weight decay for all biases and norm
    layers.

    Raises:
        ConfigError: when called, if a prefix matches no parameter, if a trainable parameter matches no prefix and
            there is no `default`, or if `finetune` is set and the network does not define the method.
    """

    def add_params(
        self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: bool = False
    ) -> None:
        """Append `{"params": [parameter], **options}` for each parameter of the model that has a learning rate."""
        rates = _rates_by_prefix(module, self.paramwise_cfg)
        starts: Mapping[str, float] = self.paramwise_cfg.get("warmup_initial_lr", {})
        no_decay = _biases_and_norms(module) if self.paramwise_cfg.get(_NO_DECAY) else set()
        named = _named_parameters(module)
        # Skip this check with finetune, because get_finetune_lr_dict may list heads that the network does not have.
        if "finetune" not in self.paramwise_cfg:
            _check_prefixes(rates, named)
        labels: dict[Any, list[str]] = {}
        for key, rate in rates.items():
            labels.setdefault((rate, starts.get(key)), []).append(key)
        for name, parameter in named.items():
            key = _prefix(name, rates)
            if not (parameter.requires_grad or rates.get(key)):
                continue  # other frozen parameters have a group, because a hook may unfreeze them
            if key not in rates:
                raise ConfigError(f"add a 'default' rate, because no prefix matches '{name}'", _INITIAL)
            rate, start = rates[key], starts.get(key)
            options: dict[str, Any] = {"lr": rate, "name": ", ".join(labels[rate, start])}
            if start is not None:
                options["warmup_initial_lr"] = start
            if id(parameter) in no_decay:
                options["weight_decay"] = 0.0
            params.append({"params": [parameter], **options})


def freeze(model: nn.Module, paramwise_cfg: Mapping[str, Any]) -> None:
    """Disable gradients of all parameters to which `PrefixOptimWrapperConstructor` assigns a learning rate of 0.

    Call this function before the model is wrapped for distributed training. As in SuperGradients, BatchNorm statistics
    of frozen layers are still updated.

    Args:
        model: a model whose `network` attribute is the user's network.
        paramwise_cfg: as for the constructor.

    Raises:
        ConfigError: see the constructor.
    """
    rates = _rates_by_prefix(model, paramwise_cfg)
    for name, parameter in _named_parameters(model).items():
        if rates.get(_prefix(name, rates)) == 0:
            parameter.requires_grad_(False)


def _rates_by_prefix(model: nn.Module, rules: Mapping[str, Any]) -> Mapping[str, float]:
    """Return a dict of learning rates by prefix: `initial_lr`, or the network's rates for fine-tuning."""
    rates: Mapping[str, float] = rules["initial_lr"]
    if not rules.get("finetune"):
        return rates
    network: Any = getattr(model, "network", model)
    if not hasattr(network, "get_finetune_lr_dict"):
        raise ConfigError(
            f"{type(network).__name__} has no method get_finetune_lr_dict(lr), which returns a dict such as {{'head': "
            "lr, 'default': 0}; add it, or set initial_lr to a dict",
            "training_params.finetune",
        )
    return _rates(network.get_finetune_lr_dict(rates["default"]), "finetune")


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map names in the user's network to parameters. A shared parameter appears once, under its first name."""
    network = getattr(model, "network", None)
    prefix = "network." if isinstance(network, nn.Module) else ""
    return {name.removeprefix(prefix): parameter for name, parameter in model.named_parameters()}


def _biases_and_norms(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that SuperGradients excludes from weight decay."""
    parts = ((part, part.named_parameters(recurse=False)) for part in model.modules())
    return {id(p) for part, named in parts for name, p in named if name == "bias" or isinstance(part, NORMS)}


def _prefix(name: str, rates: Iterable[str]) -> str:
    """Return the longest key that is a prefix of `name`, or `default` if there is none."""
    matching = [key for key in rates if key != "default" and name.startswith(key)]
    return max(matching, key=len, default="default")


def _check_prefixes(rates: Iterable[str], names: Iterable[str]) -> None:
    known = {part for name in names for part in (name, *name.split("."))}
    for key in rates:
        if key != "default" and not any(name.startswith(key) for name in names):
            raise ConfigError(f"no parameter name starts with '{key}'{did_you_mean(key, known)}", _INITIAL)


def _rates(value: Any, key: str) -> dict[str, float]:
    """Return a dict of learning rates by prefix. A number applies to all parameters."""
    config_path = f"training_params.{key}"
    if value is None or value == {}:
        raise ConfigError("is required; use a number, or a dict of rates by name prefix", config_path)
    rates = dict(value) if isinstance(value, Mapping) else {"default": value}
    for prefix, rate in rates.items():
        if not matches(rate, float) or not 0 <= rate < math.inf:
            raise ConfigError(f"must be a non-negative number, not {rate!r}", f"{config_path}.{prefix}")
    return rates
