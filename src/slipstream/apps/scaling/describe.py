"""Determine the blocks of a network and their costs on the meta device, without computing values."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.apps.scaling.model_profile import Block, Model
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["describe"]

_BATCH = 2  # after pooling to 1 x 1, BatchNorm rejects a batch of one sample


@dataclass
class _Part:
    name: str
    parameters: int
    norm_channels: int
    flops: float = 0.0
    saved_bytes: float = 0.0


@dataclass
class _Observer:
    """Attributes FLOPs and saved tensors to the most recently executed module with parameters."""

    count_flops: Any
    seen: set[int]
    parts: dict[str, _Part] = field(default_factory=dict)
    current: _Part | None = None
    counted: float = 0.0
    saved_tensors: list[Tensor] = field(default_factory=list)

    def enter(self, name: str, parameters: int, norm_channels: int) -> None:
        self.count_current()
        self.current = self.parts.setdefault(name, _Part(name, parameters, norm_channels))

    def count_current(self) -> None:
        total = self.count_flops()
        if self.current is not None:
            self.current.flops += total - self.counted
            self.counted = total

    def save(self, tensor: Tensor) -> Tensor:
        # Count a storage shared by several tensors only once. Meta storages have no address, so compare `_cdata`.
        storage = tensor.untyped_storage()
        if self.current is not None and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.saved_tensors.append(tensor)
            self.current.saved_bytes += storage.nbytes()
        return tensor


def describe(network: nn.Module, input_shape: tuple[int, ...], name: str | None = None) -> Model:
    """Return the blocks of a network in training mode, one for each module that has parameters of its own.

    Operations without parameters (activations, pooling, resizing) are attributed to the preceding block. FLOPs include
    only matrix multiplications and convolutions (`torch.utils.flop_counter`). The number of activations is the size of
    the storages that autograd saves, divided by the size of a float32 value.

    Args:
        network: the network. This function analyzes a copy and does not change the network.
        input_shape: shape of one sample, without the batch dimension.
        name: name of the model. Default: the class name.

    Raises:
        ModelError: if the network has no trainable parameters or does not accept inputs of this shape.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    copy = deepcopy(network).to("meta").train()
    tensors = [*copy.parameters(), *copy.buffers()]
    flops = FlopCounterMode(display=False)
    observer = _Observer(flops.get_total_flops, {t.untyped_storage()._cdata for t in tensors})
    _observe(network, copy, observer)
    with ExitStack() as stack:
        stack.enter_context(flops)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(observer.save, lambda tensor: tensor))
        try:
            outputs = copy(torch.empty(_BATCH, *input_shape, device="meta"))
        except (RuntimeError, TypeError, ValueError) as error:
            shape = " x ".join(map(str, input_shape))
            raise ModelError(
                f"{type(network).__name__} does not accept an input of shape {shape} ({error}); use the shape of one "
                "sample, without the batch dimension"
            ) from error
        observer.count_current()
    del outputs
    if not observer.parts:
        raise ModelError(
            f"{type(network).__name__} has no trainable parameters; set requires_grad=True for the parameters to train"
        )
    blocks = tuple(
        Block(p.name, p.parameters, p.flops / _BATCH, p.saved_bytes / 4 / _BATCH, p.norm_channels)
        for p in observer.parts.values()
    )
    return Model(name or type(network).__name__, blocks)


def _observe(network: nn.Module, copy: nn.Module, observer: _Observer) -> None:
    from torch.nn.modules.batchnorm import _BatchNorm

    owned: set[int] = set()
    for (name, module), copied in zip(network.named_modules(), copy.modules(), strict=True):
        # Attribute shared parameters to the first module that uses them. They are no longer shared in the copy on the
        # meta device, so compare the parameters of the original network.
        new = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in owned]
        owned.update(map(id, new))
        if new:
            channels = module.num_features if isinstance(module, _BatchNorm) else 0
            attributes = (name, sum(p.numel() for p in new), channels)
            copied.register_forward_pre_hook(
                lambda _m, _x, attributes=attributes: observer.enter(*attributes)
            )
