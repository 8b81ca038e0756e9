"""Fully sharded data parallelism: each process keeps a part of every weight, gradient and optimizer state."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.config import options
from slipstream.dist import all_gather_object, broadcast, get_world_size
from slipstream.dist.sharding import is_sharded, mesh_of, shard_like, whole
from slipstream.errors import ConfigError, DistributedError, did_you_mean
from slipstream.model.wrappers.distributed import train_wrapped
from slipstream.registry import MODEL_WRAPPERS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slipstream.optim import OptimWrapper

__all__ = [
    "FullyShardedOptions",
    "MMFullyShardedDataParallel",
    "repeated_blocks",
    "unsharded_gradients",
    "whole_weights",
]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WORTH_GATHERING = 1 << 18  # parameters; a smaller all-gather takes about as long to start as to run
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called, so nothing could gather their weights


@dataclass(frozen=True)
class FullyShardedOptions:
    """The options of `MMFullyShardedDataParallel`, and of `parallel=dict(type='fsdp2', ...)`."""

    shard_size: int | Literal["machine"] | None = None
    """How many processes share one copy of the model: all (None), those of a machine, or a number. With fewer
    than all, each group of them holds a copy (hybrid sharding, HSDP): gathering stays within the group."""
    wrap: list[str] = field(default_factory=list)
    """Class names of the blocks that are gathered one at a time. By default those that repeat: the children
    of a `ModuleList` or `Sequential` that have children of their own and are there at least twice, if they
    hold at least 262,144 parameters."""
    min_params: int | None = None
    """Instead of naming blocks: every smallest module with at least that many parameters is one."""
    param_dtype: Literal["bf16"] | None = None
    """Precision in which weights are gathered and forward and backward run (floating-point inputs are cast, too);
    the shards, the optimizer and BatchNorm keep the model's own."""
    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Precision in which gradients are summed over processes, where `param_dtype` is given."""
    reshard_after_forward: bool | int | None = None
    """Free gathered weights after forward (True; less memory), keep them for backward (False; less traffic), or
    keep parts on groups of so many processes. None frees those of blocks and keeps the rest."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.wrap and self.min_params is not None:
            raise ConfigError("give wrap or min_params, not both", "min_params")
        if self.min_params is not None and self.min_params < 1:
            raise ConfigError(f"must be at least 1, not {self.min_params}", "min_params")


@MODEL_WRAPPERS.register_module()
class MMFullyShardedDataParallel(nn.Module):
    """A model sharded in place by torch's `fully_shard` (FSDP2; HSDP with a `shard_size` below all processes).

    Rajbhandari et al. 2020 (ZeRO stage 3, arXiv 1910.02054), Zhao et al. 2023 (FSDP, arXiv 2304.11277). A step
    computes what one process with the whole batch would. Parameters become `DTensor`s; names and buffers stay.

    Args:
        module: the model on its device; rank 0's weights are everybody's.
        kwargs: `FullyShardedOptions`.
    """

    forward_needs_all_ranks = True
    """Every forward gathers weights from all processes of a group, so each must call it equally often."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        how = options(FullyShardedOptions, kwargs, "")
        self.module: Any = module
        self._sync = self._settled = True
        self._reduces_always = how.param_dtype is not None
        for tensor in chain(module.parameters(), module.buffers()):
            broadcast(tensor.detach())
        self.mesh = _mesh(module, how.shard_size)
        self._units = _shard(module, self.mesh, how)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; whether its backward sums gradients over processes is settled here, as in DDP."""
        if self._sync is not self._settled:  # it walks through all modules
            self.module.set_requires_gradient_sync(self._sync)
            self._settled = self._sync
        return self.module(*args, **kwargs)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log."""
        return train_wrapped(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Return the wrapped model's predictions."""
        predictions = self.module.val_step(data)
        self._reshard()
        return predictions

    def test_step(self, data: Any) -> Any:
        """Return the wrapped model's predictions."""
        predictions = self.module.test_step(data)
        self._reshard()
        return predictions

    def _reshard(self) -> None:
        """Free weights that torch keeps gathered for a backward which does not come; others read the shards."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forwards inside leave their gradients unsummed, to be summed with those of a later batch.

        With a `param_dtype`, each batch's are summed at once: torch would hold them where no checkpoint finds them.
        """
        self._sync = self._reduces_always
        try:
            yield
        finally:
            self._sync = True


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Let a sharded model hold its whole weights as plain parameters inside the block, and its shards of them after.

    For code that fills weights, such as `init_weights`: a random draw into a shard would differ from one process's.
    Nothing happens to a model that is not sharded.
    """
    places = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if is_sharded(param)
    ]
    plain = {
        param: nn.Parameter(whole(param), requires_grad=param.requires_grad)
        for _, _, param in places
        if param is not None
    }
    for module, name, param in places:
        module._parameters[name] = plain[param]  # type: ignore[index]
    try:
        yield
    finally:
        for module, name, param in places:
            module._parameters[name] = param
    with torch.no_grad():
        for param, full in plain.items():
            param.copy_(shard_like(full, param))


def unsharded_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of this process's gradients that a sharded model has not yet summed, by parameter name.

    Every rank calls it, between a backward and a forward; one block after the other is gathered for it.
    """
    held: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(module, "unshard") and mesh_of(module) is not None:
            module.unshard()
            for key, param in module.named_parameters(name):
                if param.grad is not None and not is_sharded(param):
                    held[key] = param.grad.clone()
            module.reshard()
    return held


# ---- how a model is sharded --------------------------------------------------------------------------


def _mesh(module: nn.Module, shard_size: int | str | None) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    world = get_world_size()
    size = _per_machine() if shard_size == "machine" else world if shard_size is None else int(shard_size)
    if size < min(2, world) or world % size:
        raise ConfigError(
            f"{size} processes cannot share a model among {world}: it must be at least 2 and divide their number "
            "(with one process a machine, use parallel='ddp' or 'fsdp2')",
            "shard_size",
        )
    device = next(module.parameters()).device.type
    if size == world:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (world // size, size), mesh_dim_names=("replicate", "shard"))


def _per_machine() -> int:
    """Return how many processes each machine runs.

    Raises:
        DistributedError: the launcher does not say, or machines run different numbers.
    """
    sizes = set(all_gather_object(os.environ.get("LOCAL_WORLD_SIZE", "")))
    text = sizes.pop()
    if sizes or not text.isdigit():
        given = sorted({text, *sizes})
        raise DistributedError(
            f"sharding within each machine needs the same LOCAL_WORLD_SIZE on all, but it is {given}: "
            "give shard_size, the number of processes that share a model"
        )
    return int(text)


def _shard(model: nn.Module, mesh: DeviceMesh, how: FullyShardedOptions) -> list[Any]:
    """Shard the model in place, and return the modules that gather weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reduce = None if how.param_dtype is None else _DTYPES[how.reduce_dtype]
    lower = None if how.param_dtype is None else _DTYPES[how.param_dtype]
    units: list[Any] = []

    def shard(unit: Any, policy: Any) -> None:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=how.reshard_after_forward)

    for block in [*_blocks(model, how), model]:
        norms = [
            m for m in block.modules() if lower and isinstance(m, _BatchNorm) and m.affine and m not in units
        ]
        if norms:  # torch wants their weights in the precision of their running statistics
            shard(norms, MixedPrecisionPolicy(None, reduce, cast_forward_inputs=False))
        if block not in norms:
            shard(block, MixedPrecisionPolicy(lower, reduce))
        units += [*norms, block]
    return units


def _blocks(model: nn.Module, how: FullyShardedOptions) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, inner ones first; the rest of the model is one more."""
    if how.wrap:
        found = _named(model, how.wrap)
    elif how.min_params is not None:
        found = _large(_inner_first(model), how.min_params)
    else:
        found = _large(repeated_blocks(model), _WORTH_GATHERING)
    uses = _uses(model)
    # Weights that are also used outside a block would be two from then on: such a block stays with the rest.
    return [m for m in found if m is not model and all(n == uses[p] for p, n in _uses(m).items())]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(param for _, param in model.named_parameters(remove_duplicate=False))


def _inner_first(model: nn.Module) -> list[nn.Module]:
    candidates = [
        m for m in model.modules() if not isinstance(m, _CONTAINERS) and any(True for _ in m.parameters())
    ]
    return candidates[::-1]  # modules() comes to a module before it comes to its children


def _named(model: nn.Module, names: list[str]) -> list[nn.Module]:
    classes = {m: {kind.__name__ for kind in type(m).__mro__} for m in _inner_first(model)}
    for name in names:
        if not any(name in own for own in classes.values()):
            known = {type(m).__name__ for m in classes}
            raise ConfigError(
                f"the model has no module of the class '{name}'{did_you_mean(name, known)}", "wrap"
            )
    return [m for m, own in classes.items() if own & set(names)]


def _large(candidates: list[nn.Module], least: int) -> list[nn.Module]:
    """Return those that hold at least so many parameters, apart from those that smaller ones already hold."""
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in candidates:
        rest = [param for param in module.parameters() if param not in taken]
        if sum(param.numel() for param in rest) >= least:
            found.append(module)
            taken.update(rest)
    return found


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats, inner ones before those around them.

    They are the children of a `ModuleList` or `Sequential` that have children of their own and whose class is there
    at least twice.
    """
    found: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in container)
            found.update(m for m in container if kinds[type(m)] > 1 and any(True for _ in m.children()))
    return [module for module in _inner_first(model) if module in found]
