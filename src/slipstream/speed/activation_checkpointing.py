"""Speed option: recompute the activations of blocks in the backward pass instead of storing them.

Chen et al. 2016 (arXiv 1604.06174), implemented with torch's `checkpoint`. The recomputation has no side effects: it
draws the same random numbers, does not change buffers (such as BatchNorm's running statistics), attributes or arguments
(such as a key-value cache), and does not repeat SyncBN's communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from slipstream.model.blocks import find_blocks
from slipstream.model.sync_batchnorm import all_reduce_override
from slipstream.step.dynamo import recompute_in_graph
from slipstream.step.snapshot import RandomState, Snapshot

__all__ = ["ActivationCheckpointingOptions", "checkpoint_activations", "is_recomputed"]


@dataclass(frozen=True)
class ActivationCheckpointingOptions:
    """Options of `activation_checkpointing=dict(...)`; a list sets `modules`, and True selects the defaults."""

    shorthand: ClassVar = "modules"

    modules: list[str] | None = None
    """Blocks by name (`backbone.layer1`) or by class (`Bottleneck`). Names may contain the wildcards `*` and `?`, which
    do not match dots (`blocks.*`). The default is the repeated blocks: children of a `ModuleList` or `Sequential`, or
    of a module whose children all have the same class. They themselves have children, and their class occurs at least
    twice. If blocks are nested, only the outermost blocks are used."""
    offload: bool = False
    """Whether to store block inputs in host memory until the backward pass; compiled code ignores this option."""


def checkpoint_activations(model: nn.Module, options: ActivationCheckpointingOptions) -> list[str]:
    """Checkpoint the activations of blocks in `model`, in place; return the names of these blocks.

    Module names and state dict keys do not change. The model can be copied. A forward pass without gradients is not
    affected. `model` must not be wrapped in DDP, but may be sharded by `fully_shard`.

    Raises:
        ConfigError: a name matches no module or matches a container that is never called, or the model has no
            repeated blocks.
    """
    blocks = find_blocks(model, options.modules, "activation_checkpointing.modules")
    for module in blocks:
        if not is_recomputed(module):
            module.forward = update_wrapper(
                partial(_recomputed, module, module.forward, options.offload), module.forward
            )
    return [name for name, module in model.named_modules() if module in blocks]


# ---- run blocks --------------------------------------------------------------------------------------


def is_recomputed(module: nn.Module) -> bool:
    """Return whether the activations of a module are recomputed in the backward pass."""
    return isinstance(module.forward, partial) and module.forward.func is _recomputed


def _recomputed(
    module: nn.Module, forward: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` with checkpointing. A `partial` of this function, which can be pickled, replaces `forward`."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Pass keyword arguments as positional inputs, because torch searches only these for tensors to offload and for
    # devices whose random state it saves.
    block, inputs = partial(_call, forward, tuple(kwargs)), (*args, *kwargs.values())
    if torch.compiler.is_compiling():  # the compiler recomputes inside the graph, without side effects
        return checkpoint(block, None, *inputs, use_reentrant=False, context_fn=recompute_in_graph)
    # torch does not find tensors inside some objects, such as dataclasses, so also pass a tensor on the parameters'
    # device.
    tensor = next(chain(module.parameters(), module.buffers()), None)
    first = None if tensor is None else torch.empty(0, device=tensor.device)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        recomputation = _Recomputation()
        return recomputation.record(module, inputs), recomputation

    with saved_tensors_hooks(_to_host, _from_host) if offload else nullcontext():
        return checkpoint(block, first, *inputs, use_reentrant=False, context_fn=contexts)


def _call(forward: Callable[..., Any], names: tuple[str, ...], _: Tensor | None, *inputs: Any) -> Any:
    """Call `forward`; the last `len(names)` inputs are keyword arguments with these names."""
    count = len(inputs) - len(names)
    return forward(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if tensor.device.type == "cpu" or not tensor.numel():
        return tensor.device, tensor
    # Unlike torch's save_on_cpu, this preserves the memory format.
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, host = packed
    return host.to(device, non_blocking=True)


# ---- suppress side effects ---------------------------------------------------------------------------


class _Recomputation(AbstractContextManager[None]):
    """Reusable context manager for a recomputation with the state, random states and SyncBN sums of the forward pass.

    On exit, the state is restored to its values before the recomputation.
    """

    def __init__(self) -> None:
        # The sums over all processes that SyncBN computed.
        self._sums: list[Tensor] = []
        self._exit = ExitStack()

    @contextmanager
    def record(self, module: nn.Module, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Record the state and SyncBN sums of the forward pass; torch records the random state of the device."""
        self._state = Snapshot(module, inputs, recomputes=True)
        self._random = RandomState(torch.device("cpu"))
        token = all_reduce_override.set(partial(self._record_sum, all_reduce_override.get()))
        try:
            yield
        finally:
            all_reduce_override.reset(token)
        self._state.keep_changes()

    def _record_sum(self, outer: Any, values: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        total = send(values) if outer is None else outer(values, send)
        self._sums.append(total.detach())
        return total

    def __enter__(self) -> None:
        sums = iter(self._sums)
        token = all_reduce_override.set(
            lambda values, send: next(sums).detach().requires_grad_(values.requires_grad)
        )
        self._exit.callback(all_reduce_override.reset, token)
        self._exit.callback(RandomState(torch.device("cpu")).restore)
        self._random.restore()
        self._exit.enter_context(self._state.installed())

    def __exit__(self, *_: Any) -> None:
        self._exit.close()
