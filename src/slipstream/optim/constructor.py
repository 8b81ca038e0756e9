"""Construction of parameter groups, optimizers and optimizer wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from logging import getLogger
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from slipstream.config import options
from slipstream.errors import ConfigError, ModelError, did_you_mean
from slipstream.optim.optim_wrapper import OptimWrapper
from slipstream.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from slipstream.typecheck import NonNegative, check

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: batch norms and instance norms
_NON_COMMERCIAL = ("Fromage", "Nero")  # CC BY-NC-SA 4.0, from pytorch_optimizer
_DEFORMABLE = {"DeformConv2d", "ModulatedDeformConv2d"}  # names, because these classes are in other libraries


@dataclass(frozen=True)
class ParamwiseOptions:
    """`paramwise_cfg`: multipliers of the optimizer's `lr` and `weight_decay` for individual parameters.

    If a parameter name contains one of the `custom_keys`, only this key applies to the parameter. If the name contains
    several keys, the longest key applies; among keys of equal length, the first key in alphabetical order applies.
    """

    # Maps substrings of parameter names to dicts with lr_mult, decay_mult and optimizer options.
    custom_keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    bias_lr_mult: NonNegative | None = None  # biases, except those of norm layers
    bias_decay_mult: NonNegative | None = None  # biases; norm_decay_mult takes precedence
    norm_decay_mult: NonNegative | None = None  # weights and biases of norm layers
    flat_decay_mult: NonNegative | None = None  # other 1-dim parameters
    dwconv_decay_mult: NonNegative | None = None  # depth-wise convolutions; bias_decay_mult takes precedence
    dcn_offset_lr_mult: NonNegative | None = None  # `conv_offset` in deformable convolutions
    bypass_duplicate: bool = False  # whether a repeated parameter keeps its first options

    def __post_init__(self) -> None:
        for key, values in self.custom_keys.items():
            for name in ("lr_mult", "decay_mult"):
                if name in values:
                    check(values[name], NonNegative, _path(key, name))
            for name in values:
                check(name, str, _path(key))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Build the optimizer and its wrapper for a model.

    Parameters with the same options form one group, because the optimizer launches separate kernels for each group.
    Frozen parameters (`requires_grad=False`) are included, so that a hook can unfreeze them later.

    A subclass may override `add_params` to set the options of every parameter (for example, for layer-wise learning
    rate decay). The override can read additional keys from `self.paramwise_cfg`.

    Args:
        optim_wrapper_cfg: arguments for the wrapper (`type` is `OptimWrapper` by default), including `optimizer`, which
            is a configuration or an optimizer object.
        paramwise_cfg: see `ParamwiseOptions`.

    Raises:
        ConfigError: `optimizer` is missing, or `paramwise_cfg` is invalid.
    """

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        self.optim_wrapper_cfg = {"type": "OptimWrapper", **optim_wrapper_cfg}
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", None)
        self.paramwise_cfg = dict(paramwise_cfg or {})
        cfg = self.paramwise_cfg
        if type(self).add_params is not DefaultOptimWrapperConstructor.add_params:
            # The override may use additional keys.
            cfg = {f.name: cfg[f.name] for f in fields(ParamwiseOptions) if f.name in cfg}
        self.paramwise = options(ParamwiseOptions, cfg, "paramwise_cfg")
        if isinstance(self.optimizer_cfg, Optimizer):
            if self.paramwise_cfg:
                raise ConfigError(
                    "requires an optimizer that is specified as a dict, not an optimizer object",
                    "paramwise_cfg",
                )
            return
        if not isinstance(self.optimizer_cfg, Mapping):
            raise ConfigError(
                f"must be a dict such as dict(type='SGD', lr=0.01), not {self.optimizer_cfg!r}", "optimizer"
            )
        self.base_lr: Any = self.optimizer_cfg.get("lr")
        self.base_wd: float | None = self.optimizer_cfg.get("weight_decay")

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Return the wrapper, with an optimizer for the parameters of `model`.

        Raises:
            ModelError: the model has no trainable parameters, or a parameter occurs twice with different options.
            ConfigError: a custom key matches no parameter, or sets an option that the optimizer does not have.
        """
        optimizer = self.optimizer_cfg
        if not isinstance(optimizer, Optimizer):
            groups = self._groups(unwrap(model))
            optimizer = OPTIMIZERS.build(self.optimizer_cfg, default_args={"params": groups})
            self._check_options(optimizer)
            if (name := type(optimizer).__name__) in _NON_COMMERCIAL:
                getLogger("slipstream").warning(f"The license of {name} forbids commercial use")
        return OPTIM_WRAPPERS.build(self.optim_wrapper_cfg, default_args={"optimizer": optimizer})

    def add_params(
        self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: bool = False
    ) -> None:
        """Append `{"params": [parameter], **options}` for every parameter of `module`, recursively."""
        for name, parameter in module.named_parameters(recurse=False):
            options = self._custom_options(f"{prefix}.{name}")
            if options is None:
                options = {
                    **self._lr_option(module, name, prefix, is_dcn_module),
                    **self._decay_option(module, name, parameter, is_dcn_module),
                }
            params.append({"params": [parameter], **options})
        inside_dcn = any(base.__name__ in _DEFORMABLE for base in type(module).__mro__)
        for name, child in module.named_children():
            self.add_params(params, child, f"{prefix}.{name}" if prefix else name, inside_dcn)

    def _custom_options(self, name: str) -> dict[str, Any] | None:
        keys = self.paramwise.custom_keys
        key = min((k for k in keys if k in name), key=lambda k: (-len(k), k), default=None)
        if key is None:
            return None
        options = dict(keys[key])
        return {
            **self._scaled("lr", options.pop("lr_mult", None)),
            **self._scaled("weight_decay", options.pop("decay_mult", None)),
            **options,
        }

    def _scaled(self, name: str, mult: float | None) -> dict[str, Any]:
        """Return the optimizer's option `name` multiplied by `mult`, or an empty dict if `mult` is None."""
        if mult is None:
            return {}
        if self.optimizer_cfg.get(name) is None:
            raise ConfigError(f"a multiplier of '{name}' requires '{name}' in the optimizer", "paramwise_cfg")
        return {name: self.optimizer_cfg[name] * mult}

    def _lr_option(self, module: nn.Module, name: str, prefix: str, is_dcn_module: bool) -> dict[str, Any]:
        offset_mult = self.paramwise.dcn_offset_lr_mult
        is_offset = is_dcn_module and "conv_offset" in prefix and isinstance(module, nn.Conv2d)
        if offset_mult is not None and is_offset:
            return self._scaled("lr", offset_mult)
        is_bias = name == "bias" and not isinstance(module, NORMS) and not is_dcn_module
        return self._scaled("lr", self.paramwise.bias_lr_mult if is_bias else None)

    def _decay_option(
        self, module: nn.Module, name: str, parameter: nn.Parameter, is_dcn_module: bool
    ) -> dict[str, Any]:
        depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        mults = self.paramwise
        rules = (
            (mults.norm_decay_mult, isinstance(module, NORMS)),
            (mults.bias_decay_mult, name == "bias" and not is_dcn_module),
            (mults.dwconv_decay_mult, depthwise),
            (mults.flat_decay_mult, parameter.ndim == 1 and not is_dcn_module),
        )
        mult = next((mult for mult, applies in rules if applies and mult is not None), None)
        return self._scaled("weight_decay", mult)

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in model.named_parameters()}
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                f"{type(model).__name__} has no trainable parameters (frozen: {len(names)}); "
                "call requires_grad_(True) on the parameters to train"
            )
        self._check_custom_keys_match(model)
        params: list[dict[str, Any]] = []
        self.add_params(params, model)
        return self._merge(params, names)

    def _merge(self, params: list[dict[str, Any]], names: dict[int, str]) -> list[dict[str, Any]]:
        """Group the parameters by their options; each parameter occurs once."""
        groups: dict[Any, dict[str, Any]] = {}
        seen: dict[int, Any] = {}
        for single in params:
            options = {key: value for key, value in single.items() if key != "params"}
            key = _hashable(options)
            for parameter in single["params"]:
                if not (parameter.requires_grad or parameter.is_floating_point()):
                    continue  # quantized weights
                earlier = seen.setdefault(id(parameter), key)
                if earlier != key and not self.paramwise.bypass_duplicate:
                    raise ModelError(
                        f"the parameter '{names.get(id(parameter))}' occurs twice in the model with different options; "
                        "set paramwise_cfg=dict(bypass_duplicate=True) to keep the first options"
                    )
                group = groups.setdefault(earlier, {"params": {}, **options})
                group["params"][id(parameter)] = parameter
        return [{**group, "params": list(group["params"].values())} for group in groups.values()]

    def _check_custom_keys_match(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for key in self.paramwise.custom_keys:
            if not any(key in f".{name}" for name in names):
                raise ConfigError(
                    f"no parameter name contains '{key}'; the names are such as {names[:3]}",
                    "paramwise_cfg.custom_keys",
                )

    def _check_options(self, optimizer: Optimizer) -> None:
        known = {"lr_mult", "decay_mult", *optimizer.defaults}
        for key, values in self.paramwise.custom_keys.items():
            for option in sorted(values.keys() - known):
                raise ConfigError(
                    f"{type(optimizer).__name__} has no option '{option}'{did_you_mean(option, known)}",
                    f"paramwise_cfg.{_path(key)}",
                )


def build_optim_wrapper(model: nn.Module, cfg: Mapping[str, Any]) -> OptimWrapper:
    """Build the optimizer wrapper for `model` from `cfg`.

    Args:
        model: a model, optionally wrapped for data parallelism.
        cfg: a dict with the keys `optimizer`, `paramwise_cfg` and `constructor` (by default
            `DefaultOptimWrapperConstructor`), and with the wrapper's arguments. This function does not modify `cfg`.
    """
    wrapper_cfg = dict(cfg)
    constructor = OPTIM_WRAPPER_CONSTRUCTORS.build(
        {
            "type": wrapper_cfg.pop("constructor", "DefaultOptimWrapperConstructor"),
            "paramwise_cfg": wrapper_cfg.pop("paramwise_cfg", None),
            "optim_wrapper_cfg": wrapper_cfg,
        }
    )
    return constructor(model)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside data-parallel wrappers, which are modules whose only child is named `module`."""
    while [name for name, _ in model.named_children()] == ["module"] and not model._parameters:
        model = model.get_submodule("module")
    return model


def _hashable(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return a hashable key; equal options have equal keys."""
    return tuple(sorted((k, float(v) if isinstance(v, Tensor) else repr(v)) for k, v in options.items()))


def _path(key: str, name: str = "") -> str:
    """Return the path of a custom key, or of one of its options, in `paramwise_cfg`."""
    quoted = f".{key}" if key.isidentifier() else f"['{key}']"  # a custom key may contain dots
    return f"custom_keys{quoted}" + (f".{name}" if name else "")
