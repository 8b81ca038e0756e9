"""Weight initializers for `init_cfg`, with the same names as in MMEngine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slipstream.errors import CheckpointError, ConfigError, ModelError
from slipstream.registry import WEIGHT_INITIALIZERS


def check_initialized(model: nn.Module) -> None:
    """Raise a ModelError if a parameter or buffer has no shape, because its lazy module has not been called."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"'{name}' of the model has no shape, because its lazy module has not been called; call the model with "
                "a batch before training, for example at the end of its constructor"
            )


def initialize(module: nn.Module, init_cfg: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Apply one or more initializers to `module`.

    Each initializer is a dict with a `type`. The optional `layer` contains the names of the layer classes (or their
    base classes) to initialize; by default, all layers with weights are initialized. The optional `override` contains
    different settings for children, selected by `name`. If `override` is set and `layer` is not, only these children
    are initialized.
    """
    for cfg in [init_cfg] if isinstance(init_cfg, Mapping) else init_cfg:
        cfg = dict(cfg)
        override = cfg.pop("override", None)
        if override is None or cfg.get("layer"):
            _apply(cfg, module)
        for special in [override] if isinstance(override, Mapping) else override or []:
            _override(module, dict(special), cfg)


def _override(module: nn.Module, special: dict[str, Any], outer: dict[str, Any]) -> None:
    name = special.pop("name", None)
    if name is None or not hasattr(module, name):
        raise ConfigError(
            f"override requires the name of a child of {type(module).__name__}, got {name!r}", "init_cfg"
        )
    cfg = special if "type" in special else {k: v for k, v in outer.items() if k != "layer"} | special
    _apply(cfg, getattr(module, name))


def _apply(cfg: Mapping[str, Any], module: nn.Module) -> None:
    try:
        WEIGHT_INITIALIZERS.build(cfg)(module)
    except ConfigError as error:
        error.path = f"init_cfg.{error.path}" if error.path else "init_cfg"
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{cfg.get('type')}: {error}", "init_cfg") from error


class _Init:
    """Initialize the weights of all layers whose class is in `layer` with `fill`, and their biases with a constant.

    With `bias_prob`, the bias is chosen so that its sigmoid equals this probability (Lin et al. 2017, section 4.1).
    """

    def __init__(
        self,
        fill: Callable[[torch.Tensor], Any],
        bias: float = 0.0,
        bias_prob: float | None = None,
        layer: str | Sequence[str] | None = None,
    ) -> None:
        self.fill = fill
        self.bias = bias if bias_prob is None else -math.log((1 - bias_prob) / bias_prob)
        self.layers = {layer} if isinstance(layer, str) else set(layer or ())

    def __call__(self, module: nn.Module) -> None:
        """Initialize the matching layers of `module`."""
        for part in module.modules():
            if not self.layers or self.layers & {kind.__name__ for kind in type(part).__mro__}:
                self._apply(part)

    @torch.no_grad()
    def _apply(self, part: nn.Module) -> None:
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, nn.Parameter):
            self.fill(weight)
        if isinstance(bias, nn.Parameter):
            nn.init.constant_(bias, self.bias)


def _select(distribution: str, uniform: Callable[..., Any], normal: Callable[..., Any]) -> Callable[..., Any]:
    if distribution not in ("uniform", "normal"):
        raise ConfigError(f"must be 'uniform' or 'normal', not {distribution!r}", "distribution")
    return uniform if distribution == "uniform" else normal


def _fill_matrix(weight: torch.Tensor, *, draw: Callable[..., Any], **options: Any) -> None:
    if weight.ndim > 1:
        draw(weight, **options)


@WEIGHT_INITIALIZERS.register_module(name=["Constant", "ConstantInit"])
class ConstantInit(_Init):
    """Fill weights with `val`."""

    def __init__(self, val: float, **kwargs: Any) -> None:
        super().__init__(partial(nn.init.constant_, val=val), **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["Normal", "NormalInit"])
class NormalInit(_Init):
    """Draw weights from N(mean, std)."""

    def __init__(self, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> None:
        super().__init__(partial(nn.init.normal_, mean=mean, std=std), **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["TruncNormal", "TruncNormalInit"])
class TruncNormalInit(_Init):
    """Draw weights from N(mean, std) truncated to [a, b]."""

    def __init__(
        self, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(partial(nn.init.trunc_normal_, mean=mean, std=std, a=a, b=b), **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["Uniform", "UniformInit"])
class UniformInit(_Init):
    """Draw weights from U(a, b)."""

    def __init__(self, a: float = 0.0, b: float = 1.0, **kwargs: Any) -> None:
        super().__init__(partial(nn.init.uniform_, a=a, b=b), **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["Xavier", "XavierInit"])
class XavierInit(_Init):
    """Xavier initialization (Glorot and Bengio 2010); weights with fewer than two dimensions are not changed."""

    def __init__(self, gain: float = 1.0, distribution: str = "normal", **kwargs: Any) -> None:
        draw = _select(distribution, nn.init.xavier_uniform_, nn.init.xavier_normal_)
        super().__init__(partial(_fill_matrix, draw=draw, gain=gain), **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["Kaiming", "KaimingInit"])
class KaimingInit(_Init):
    """Kaiming initialization (He et al. 2015); weights with fewer than two dimensions are not changed."""

    def __init__(
        self,
        a: float = 0.0,
        mode: Literal["fan_in", "fan_out"] = "fan_out",
        nonlinearity: str = "relu",
        distribution: str = "normal",
        **kwargs: Any,
    ) -> None:
        draw = _select(distribution, nn.init.kaiming_uniform_, nn.init.kaiming_normal_)
        super().__init__(
            partial(_fill_matrix, draw=draw, a=a, mode=mode, nonlinearity=nonlinearity), **kwargs
        )


@WEIGHT_INITIALIZERS.register_module(name=["Caffe2Xavier", "Caffe2XavierInit"])
class Caffe2XavierInit(KaimingInit):
    """Caffe2's XavierFill: Kaiming uniform with a=1, fan_in and leaky ReLU."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(a=1, mode="fan_in", nonlinearity="leaky_relu", distribution="uniform", **kwargs)


@WEIGHT_INITIALIZERS.register_module(name=["Pretrained", "PretrainedInit"])
class PretrainedInit:
    """Load the weights from a checkpoint; if `prefix` is set, load only those of the submodule `prefix`."""

    def __init__(self, checkpoint: str, prefix: str | None = None, map_location: str = "cpu") -> None:
        self.checkpoint, self.prefix, self.map_location = checkpoint, prefix, map_location

    def __call__(self, module: nn.Module) -> None:
        """Load the weights into `module`. Missing and unexpected keys are ignored."""
        from slipstream.checkpoint import load_checkpoint, load_weights, weights_in

        state = weights_in(load_checkpoint(self.checkpoint, self.map_location), self.checkpoint)
        if self.prefix:
            dot = self.prefix.rstrip(".") + "."
            state = {key.removeprefix(dot): value for key, value in state.items() if key.startswith(dot)}
            if not state:
                raise CheckpointError(
                    f"{self.checkpoint} contains no weight whose name starts with '{dot}'; "
                    "correct or remove the prefix"
                )
        load_weights(module, state, strict=False, source=self.checkpoint)


class PretrainedWeights:
    """Mixin for modules with pretrained weights, which a subclass loads in `_load_pretrained`.

    The constructor sets `pretrained_pending` and must not load the weights. Loading may start a download, which a
    resumed run does not need, and which `slipstream predict` must not start for a checkpoint from an untrusted source.
    """

    # Whether the pretrained weights have yet to be loaded by `load_pretrained`.
    pretrained_pending = False

    def _load_pretrained(self) -> None:
        raise NotImplementedError


def needs_pretrained(model: nn.Module) -> bool:
    """Return whether the model or one of its submodules has pretrained weights that have not been loaded yet."""
    return any(
        isinstance(module, PretrainedWeights) and module.pretrained_pending for module in model.modules()
    )


def load_pretrained(model: nn.Module) -> None:
    """Load the pretrained weights that have not been loaded yet, in the model and its submodules."""
    # Load submodules first, so that the weights of the whole model take precedence.
    for module in reversed(list(model.modules())):
        if isinstance(module, PretrainedWeights) and module.pretrained_pending:
            module._load_pretrained()
            module.pretrained_pending = False


def skip_pretrained(model: nn.Module) -> None:
    """Cancel the loading of pretrained weights, for a model whose weights are all replaced by a checkpoint."""
    for module in model.modules():
        if isinstance(module, PretrainedWeights):
            module.pretrained_pending = False
