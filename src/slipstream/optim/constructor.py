"""Construction of parameter groups, optimizers and optimizer wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from slipstream.config import options
from slipstream.errors import ConfigError, ModelError, did_you_mean
from slipstream.optim.library import check_shapes
from slipstream.optim.optim_wrapper import OptimWrapper
from slipstream.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from slipstream.typecheck import NonNegative, check

__all__ = ["NORMS", "DefaultOptimWrapperConstructor", "ParamwiseOptions", "build_optim_wrapper"]

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: batch norms and instance norms
_DEFORMABLE = {"DeformConv2d", "ModulatedDeformConv2d"}  # names, because these classes are in other libraries


@dataclass(frozen=True)
class ParamwiseOptions:
    """`paramwise_cfg`: multipliers of the optimizer's `lr` and `weight_decay` for individual parameters.

    If a parameter name contains one of the `custom_keys`, only this key applies to the parameter. If the name contains
    several keys, the longest key applies; among keys of equal length, the first key in alphabetical order applies.
    """

    custom_keys: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # maps substrings of parameter names to dicts with lr_mult, decay_mult and optimizer options
    bias_lr_mult: NonNegative | None = None  # biases, except those of norm layers
    bias_decay_mult: NonNegative | None = None  # biases; norm_decay_mult takes precedence
    norm_decay_mult: NonNegative | None = None  # weights and biases of norm layers
    flat_decay_mult: NonNegative | None = None  # other 1-dim parameters
    dwconv_decay_mult: NonNegative | None = None  # depth-wise convolutions; bias_decay_mult takes precedence
    dcn_offset_lr_mult: NonNegative | None = None  # `conv_offset` in deformable convolutions
    bypass_duplicate: bool = False  # whether a repeated parameter keeps its first options

    @classmethod
    def from_dict(cls, cfg: Mapping[str, Any], open_ended: bool = False) -> ParamwiseOptions:
        """Return the options in `cfg` after checking the keys and values. With `open_ended`, ignore unknown keys.

        Raises:
            ConfigError: a key or a value is invalid; the message names the key.
        """
        if open_ended:
            known = {f.name for f in fields(cls)}
            cfg = {key: value for key, value in cfg.items() if key in known}
        return options(cls, cfg, "paramwise_cfg")

    def __post_init__(self) -> None:
        for key, values in self.custom_keys.items():
            for name in ("lr_mult", "decay_mult"):
                if name in values:
                    check(values[name], NonNegative, _path(key, name))
            for name in values:
                check(name, str, _path(key))

    def option_with_suffix(self, suffix: str) -> str | None:
        """Return the path of a set option that ends with `suffix` (such as `"lr_mult"`), or None if there is none."""
        for name in (f.name for f in fields(self)):
            if name.endswith(suffix) and getattr(self, name) is not None:
                return name
        return next((_path(k) for k, v in self.custom_keys.items() if suffix in v), None)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Build the optimizer and its wrapper for a model.

    Parameters with the same options form one group, because the optimizer launches separate kernels for each group.
    Frozen parameters (`requires_grad=False`) are not in any group. To train them later, unfreeze them before the
    optimizer is built, or add them with `optimizer.add_param_group`.

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
        # A subclass that overrides add_params may use additional keys.
        own_rules = type(self).add_params is not DefaultOptimWrapperConstructor.add_params
        self.paramwise = ParamwiseOptions.from_dict(self.paramwise_cfg, open_ended=own_rules)
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
        for suffix, base, name in (
            ("lr_mult", self.base_lr, "lr"),
            ("decay_mult", self.base_wd, "weight_decay"),
        ):
            if base is None and (key := self.paramwise.option_with_suffix(suffix)):
                raise ConfigError(
                    f"{key} requires '{name}' in the optimizer configuration; add it", "paramwise_cfg"
                )

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Return the wrapper, with an optimizer for the trainable parameters of `model`.

        Raises:
            ModelError: the model has no trainable parameters, or a parameter occurs twice with different options.
            ConfigError: a custom key matches no parameter, or sets an option that the optimizer does not have.
        """
        optimizer = self.optimizer_cfg
        if not isinstance(optimizer, Optimizer):
            check_shapes(self.optimizer_cfg.get("type"), unwrap(model))
            groups = self._groups(unwrap(model))
            optimizer = OPTIMIZERS.build(self.optimizer_cfg, default_args={"params": groups})
            self._check_options(optimizer)
        wrapper: OptimWrapper = OPTIM_WRAPPERS.build(
            self.optim_wrapper_cfg, default_args={"optimizer": optimizer}
        )
        return wrapper

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
        scaled: dict[str, Any] = {}
        if "lr_mult" in options:
            scaled["lr"] = self.base_lr * options.pop("lr_mult")
        if "decay_mult" in options:
            scaled["weight_decay"] = self.base_wd * options.pop("decay_mult")
        return scaled | options

    def _lr_option(self, module: nn.Module, name: str, prefix: str, is_dcn_module: bool) -> dict[str, Any]:
        offset_mult = self.paramwise.dcn_offset_lr_mult
        if (
            offset_mult is not None
            and is_dcn_module
            and "conv_offset" in prefix
            and isinstance(module, nn.Conv2d)
        ):
            return {"lr": self.base_lr * offset_mult}
        bias_mult = self.paramwise.bias_lr_mult
        if bias_mult is not None and name == "bias" and not isinstance(module, NORMS) and not is_dcn_module:
            return {"lr": self.base_lr * bias_mult}
        return {}

    def _decay_option(
        self, module: nn.Module, name: str, parameter: nn.Parameter, is_dcn_module: bool
    ) -> dict[str, Any]:
        depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        options = self.paramwise
        rules = (
            (options.norm_decay_mult, isinstance(module, NORMS)),
            (options.bias_decay_mult, name == "bias" and not is_dcn_module),
            (options.dwconv_decay_mult, depthwise),
            (options.flat_decay_mult, parameter.ndim == 1 and not is_dcn_module),
        )
        mult = next((mult for mult, applies in rules if applies and mult is not None), None)
        return {} if mult is None else {"weight_decay": self.base_wd * mult}  # type: ignore[operator]

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
        """Group the trainable parameters by their options; each parameter occurs once."""
        groups: dict[Any, dict[str, Any]] = {}
        seen: dict[int, Any] = {}
        for single in params:
            options = {key: value for key, value in single.items() if key != "params"}
            key = _hashable(options)
            for parameter in single["params"]:
                if not parameter.requires_grad:
                    continue
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
                    f"no parameter name contains '{key}'{did_you_mean(key, _prefixes(names))}",
                    "paramwise_cfg.custom_keys",
                )

    def _check_options(self, optimizer: Optimizer) -> None:
        known = {"lr_mult", "decay_mult", *optimizer.defaults}
        for key, values in self.paramwise.custom_keys.items():
            for option in values:
                if option not in known:
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
    wrapper: OptimWrapper = constructor(model)
    return wrapper


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


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return all components and prefixes of the names, as suggestions for a misspelled custom key."""
    found: set[str] = set()
    for name in names:
        parts = name.split(".")
        found.update(parts, accumulate(parts, "{}.{}".format))
    return found
