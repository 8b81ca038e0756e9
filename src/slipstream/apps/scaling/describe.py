"""From a real network to the numbers of its blocks, without running it: everything happens on the meta device."""

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

_BATCH = 2  # BatchNorm refuses one value per channel, which pooling to 1 x 1 would leave


@dataclass
class _Part:
    name: str
    parameters: int
    norm_channels: int
    flops: float = 0.0
    saved_bytes: float = 0.0


@dataclass
class _Observer:
    """Charges FLOPs and saved tensors to the module with parameters that was entered last."""

    count_flops: Any
    seen: set[int]
    parts: dict[str, _Part] = field(default_factory=dict)
    current: _Part | None = None
    counted: float = 0.0
    alive: list[Tensor] = field(default_factory=list)

    def enter(self, name: str, parameters: int, norm_channels: int) -> None:
        self.settle()
        self.current = self.parts.setdefault(name, _Part(name, parameters, norm_channels))

    def settle(self) -> None:
        total = self.count_flops()
        if self.current is not None:
            self.current.flops += total - self.counted
            self.counted = total

    def save(self, tensor: Tensor) -> Tensor:
        # Two tensors may share a storage, which is kept once; meta storages have no address to compare.
        storage = tensor.untyped_storage()
        if self.current is not None and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.alive.append(tensor)
            self.current.saved_bytes += storage.nbytes()
        return tensor


def describe(network: nn.Module, input_shape: tuple[int, ...], name: str | None = None) -> Model:
    """Return the blocks of a network in training: one for each module that has parameters of its own.

    What happens between two of them (activations, pooling, resizing) is charged to the one before.
    FLOPs are those of matrix products and convolutions (`torch.utils.flop_counter`); activations are
    the storages that autograd keeps, counted in float32.

    Args:
        network: left as it is; a copy is examined.
        input_shape: of one sample, without the batch.
        name: by default that of the class.

    Raises:
        ModelError: the network has no parameters, or does not take such an input.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    copy = deepcopy(network).to("meta").train()
    tensors = [*copy.parameters(), *copy.buffers()]
    flops = FlopCounterMode(display=False)
    observer = _Observer(flops.get_total_flops, {t.untyped_storage()._cdata for t in tensors})
    _watch(network, copy, observer)
    with ExitStack() as stack:
        stack.enter_context(flops)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(observer.save, lambda tensor: tensor))
        try:
            kept = copy(torch.empty(_BATCH, *input_shape, device="meta"))
        except (RuntimeError, TypeError, ValueError) as error:
            shape = " x ".join(map(str, input_shape))
            raise ModelError(f"{type(network).__name__} cannot take an input of {shape}: {error}") from error
        observer.settle()
    del kept
    if not observer.parts:
        raise ModelError(f"{type(network).__name__} has no parameters: there is nothing to train")
    blocks = tuple(
        Block(p.name, p.parameters, p.flops / _BATCH, p.saved_bytes / 4 / _BATCH, p.norm_channels)
        for p in observer.parts.values()
    )
    return Model(name or type(network).__name__, blocks)


def _watch(network: nn.Module, copy: nn.Module, observer: _Observer) -> None:
    from torch.nn.modules.batchnorm import _BatchNorm

    owned: set[int] = set()
    for (name, module), copied in zip(network.named_modules(), copy.modules(), strict=True):
        # Tied weights belong to the first module that has them; on the meta device they are no longer tied.
        new = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in owned]
        owned.update(map(id, new))
        if new:
            channels = module.num_features if isinstance(module, _BatchNorm) else 0
            facts = (name, sum(p.numel() for p in new), channels)
            copied.register_forward_pre_hook(lambda _m, _x, facts=facts: observer.enter(*facts))
