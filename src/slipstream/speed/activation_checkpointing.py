"""Option: recompute the inside of blocks in backward instead of keeping it in memory.

Chen et al. 2016 (arXiv 1604.06174), with torch's `checkpoint`. What a recomputation must not do twice, it does not:
random numbers are drawn again from the same state, buffers (BatchNorm's running statistics) move once, and SyncBN
sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.config import options
from slipstream.errors import ConfigError
from slipstream.model.sync_batchnorm import summing
from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.blocks import named_blocks

__all__ = [
    "ActivationCheckpointingOptions",
    "checkpoint_activations",
    "read_activation_checkpointing",
]

_KEY = "activation_checkpointing"


@dataclass(frozen=True)
class ActivationCheckpointingOptions:
    """`activation_checkpointing=dict(...)`; a list gives `modules`, True the defaults."""

    modules: list[str] | None = None
    """Blocks by name (`backbone.layer1`, with wildcards for parts between dots: `blocks.*`) or by class
    (`Bottleneck`). By default those that repeat: the children of a `ModuleList` or `Sequential` that have
    children of their own and are there at least twice. Of blocks inside one another the outermost counts."""
    offload: bool = False
    """Keep the blocks' inputs in host memory until backward; compiled code keeps them on the device."""

    def __post_init__(self) -> None:
        """Refuse what names no module."""
        if self.modules is not None and not (self.modules and all(isinstance(m, str) for m in self.modules)):
            raise ConfigError(f"expected names of modules or classes, not {self.modules!r}", "modules")


def read_activation_checkpointing(value: Any) -> ActivationCheckpointingOptions | None:
    """Read `activation_checkpointing` as a configuration has it: True, False, None, a list of names or a dict.

    Raises:
        ConfigError: anything else, an unknown option, or modules that are no names.
    """
    if value is None or value is False or value == []:
        return None
    if value is True:
        value = {}
    elif isinstance(value, list):
        value = {"modules": value}
    return options(ActivationCheckpointingOptions, value, _KEY)


def checkpoint_activations(model: nn.Module, how: ActivationCheckpointingOptions) -> list[str]:
    """Let blocks of `model` keep only their inputs for backward, in place; return the names of these blocks.

    Nothing else about the model changes: names and keys stay, copies of it recompute for themselves, and a forward
    without gradient is as before. `model` is not wrapped (DDP) yet, but may be sharded by `fully_shard`.

    Raises:
        ConfigError: a name matches nothing, or a container that is never called; or no block repeats.
    """
    chosen = _outermost(model, _chosen(model, how.modules))
    # torch warns of in-place operations for fear of kept results that change; the graph has none (tested).
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_of_context_fn)
    for module in chosen.values():
        if not _is_recomputed(module):
            module.forward = update_wrapper(
                partial(_recomputed, module, module.forward, how.offload), module.forward
            )
    return list(chosen)


# ---- which blocks ------------------------------------------------------------------------------------


def _names(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a model with all their names; one that is used twice comes twice."""
    return list(model.named_modules(remove_duplicate=False))[1:]


def _chosen(model: nn.Module, words: list[str] | None) -> set[nn.Module]:
    if words is not None:
        return set(named_blocks(model, words, f"{_KEY}.modules"))
    found = {module for module in repeated_blocks(model) if module is not model}
    if not found:
        raise ConfigError("no block of the model repeats: name those to recompute", _KEY)
    return found


def _outermost(model: nn.Module, blocks: set[nn.Module]) -> dict[str, nn.Module]:
    """Return by name those blocks that are, at least once, used outside of the others."""
    names = [(name, module) for name, module in _names(model) if module in blocks]
    every = {name for name, _ in names}
    outer: dict[nn.Module, str] = {}
    for name, module in names:
        parts = name.split(".")
        if not any(".".join(parts[:end]) in every for end in range(1, len(parts))):
            outer.setdefault(module, name)
    return {name: module for module, name in outer.items()}


# ---- how they run ------------------------------------------------------------------------------------


def _is_recomputed(module: nn.Module) -> bool:
    return isinstance(module.forward, partial) and module.forward.func is _recomputed


def _recomputed(
    module: nn.Module, forward: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for the `forward` of `module`. A `partial` of it is copied with its module, and pickled."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # torch looks for devices, whose random states it keeps, and for what to offload among positional inputs alone.
    block, args = partial(_call, forward, tuple(kwargs)), (*args, *kwargs.values())
    if torch.compiler.is_compiling():  # the compiler recomputes in the graph, where nothing happens twice
        contexts = partial(create_selective_checkpoint_contexts, _keep_in_graph)
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
    with saved_tensors_hooks(_to_host, _from_host) if offload else nullcontext():
        return checkpoint(block, *args, use_reentrant=False, context_fn=partial(_contexts, module))


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    """Call `forward` with inputs of which the last have these names."""
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _keep_in_graph(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what drew random numbers and what processes sent one another; all else is computed again."""
    random = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    sent = getattr(operator, "namespace", "") == "_c10d_functional"
    return CheckpointPolicy.MUST_SAVE if random or sent else CheckpointPolicy.PREFER_RECOMPUTE


def _not_of_context_fn(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    # Unlike torch's save_on_cpu, this keeps the memory format.
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, host = packed
    return host.to(device, non_blocking=True)


# ---- what happens once -------------------------------------------------------------------------------


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the surroundings of one forward of `module` and of its recomputation."""
    again = _Again()
    return again.remember(module), again


class _Again(AbstractContextManager[None]):
    """Surroundings in which a recomputation finds what forward found, and of which nothing stays; reusable."""

    def __init__(self) -> None:
        # Where a buffer is, and what it was.
        self._found: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        # What SyncBN received.
        self._sums: list[Tensor] = []
        self._leave = ExitStack()

    @contextmanager
    def remember(self, module: nn.Module) -> Iterator[None]:
        """Surround the forward."""
        before = [
            (owner._buffers, name, buffer, buffer._version, _old(owner, buffer))
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        token = summing.set(partial(self._hear, summing.get()))
        try:
            yield
        finally:
            summing.reset(token)
        for place, name, buffer, version, old in before:
            if old is None:
                self._found.append((place, name, buffer))
            elif place[name] is not buffer or buffer._version != version:
                self._found.append((place, name, old))

    def _hear(self, outer: Any, values: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        total = send(values) if outer is None else outer(values, send)
        self._sums.append(total.detach())
        return total

    def __enter__(self) -> None:
        heard = iter(self._sums)
        token = summing.set(lambda values, send: next(heard).detach().requires_grad_(values.requires_grad))
        self._leave.callback(summing.reset, token)
        for place, name, old in self._found:
            self._leave.callback(place.__setitem__, name, place[name])
            place[name] = old.clone()

    def __exit__(self, *_: Any) -> None:
        self._leave.close()


def _old(owner: nn.Module, buffer: Tensor) -> Tensor | None:
    """Return a copy of a buffer; None for BatchNorm, of which nobody sees that it writes.

    Its output in training ignores what the buffer was.
    """
    return None if isinstance(owner, _BatchNorm) else buffer.clone()
