"""Fully sharded data parallelism: each process stores a shard of every weight, gradient and optimizer state."""

from __future__ import annotations

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
from slipstream.dist import broadcast, get_local_size, get_world_size
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers.distributed import ModelAttributes, train_wrapped
from slipstream.registry import MODEL_WRAPPERS
from slipstream.sharding import full_tensor, is_sharded, mesh_of, shard_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slipstream.optim import OptimWrapper

__all__ = [
    "FullyShardedOptions", "MMFullyShardedDataParallel", "full_weights",
    "repeated_blocks", "unsharded_gradients",
]  # fmt: skip

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MIN_UNIT_SIZE = 1 << 18  # number of parameters; latency dominates smaller all-gathers
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # these modules are never called, so they cannot gather weights


@dataclass(frozen=True)
class FullyShardedOptions:
    """Options for `MMFullyShardedDataParallel` and for `parallel=dict(type='fsdp2', ...)`."""

    shard_size: int | Literal["machine"] | None = None
    """Number of processes that share one copy of the model: all processes (None), those on one machine ('machine'), or
    a number. If the number is less than the world size, each group of processes stores a copy of the model and gathers
    weights within the group (hybrid sharding, HSDP)."""
    wrap: list[str] = field(default_factory=list)
    """Class names of the blocks that are gathered separately. The default is all repeated blocks with at least 262,144
    parameters. Repeated blocks are children of a `ModuleList` or `Sequential` that have children of their own and
    whose class occurs at least twice in the container."""
    param_dtype: Literal["bf16"] | None = None
    """Dtype of gathered weights and of the forward and backward passes; floating-point inputs are also cast. The
    shards, the optimizer and BatchNorm keep the model's dtype."""
    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Dtype in which gradients are summed over processes; used only with `param_dtype`."""
    reshard_after_forward: bool | int | None = None
    """Free gathered weights after the forward pass (True; less memory), keep them for the backward pass (False; less
    communication), or reshard them over groups of this many processes (int). None frees the weights of blocks and
    keeps all other weights."""


@MODEL_WRAPPERS.register_module()
class MMFullyShardedDataParallel(ModelAttributes):
    """A model sharded in place by torch's `fully_shard` (FSDP2; HSDP if `shard_size` is less than the world size).

    See Rajbhandari et al. 2020 (ZeRO stage 3, arXiv 1910.02054) and Zhao et al. 2023 (FSDP, arXiv 2304.11277). As in
    DDP, gradients are averaged over all processes. Parameters become `DTensor`s; names and buffers do not change.

    Args:
        module: the model, already on its device; the weights of rank 0 are broadcast to all ranks.
        kwargs: fields of `FullyShardedOptions`.
    """

    forward_needs_all_ranks = True
    """Forward passes gather weights from all processes, so all processes must run the same number of forward passes."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        config = options(FullyShardedOptions, kwargs, "")
        self.module: Any = module
        self._sync = self._applied_sync = True
        self._reduces_always = config.param_dtype is not None
        for tensor in chain(module.parameters(), module.buffers()):
            broadcast(tensor.detach())
        self.mesh = _mesh(module, config.shard_size)
        self._units = _shard(module, self.mesh, config)
        self._complete = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; as in DDP, `no_sync` around the forward pass disables gradient synchronization."""
        if self._sync is not self._applied_sync:  # avoid unnecessary calls, which visit all modules
            self.module.set_requires_gradient_sync(self._sync)
            self._applied_sync = self._sync
        return self.module(*args, **kwargs)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log."""
        return train_wrapped(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        predictions = self.module.val_step(data)
        self._reshard()
        return predictions

    def test_step(self, data: Any) -> Any:
        """Return the predictions of the wrapped model."""
        predictions = self.module.test_step(data)
        self._reshard()
        return predictions

    def _reshard(self) -> None:
        """Free the weights that torch keeps gathered for a backward pass, because no backward pass follows."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Delay gradient reduction across processes until a later batch.

        With `param_dtype`, the gradients of each batch are reduced immediately, because torch keeps unreduced gradients
        internally, where they cannot be saved in a checkpoint.
        """
        self._sync = self._reduces_always
        try:
            yield
        finally:
            self._sync = True


@contextmanager
def full_weights(model: nn.Module) -> Iterator[None]:
    """Replace the sharded parameters of a model with full parameters inside the context, then shard them again.

    Use this context manager for code that sets weights, such as `init_weights`, because random values drawn for a shard
    differ from those that a single process draws. An unsharded model is not changed.
    """
    owners = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if is_sharded(param)
    ]
    plain = {
        param: nn.Parameter(full_tensor(param), requires_grad=param.requires_grad)
        for _, _, param in owners
        if param is not None
    }
    for module, name, param in owners:
        module._parameters[name] = plain[param]  # type: ignore[index]
    try:
        yield
    finally:
        for module, name, param in owners:
            module._parameters[name] = param
    with torch.no_grad():
        for param, full in plain.items():
            param.copy_(shard_like(full, param))


def unsharded_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of this process's gradients that have not been summed over processes yet, by parameter name.

    Every rank must call this function between a backward pass and the next forward pass. Blocks are gathered one at a
    time.
    """
    grads: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(type(module), "unshard") and mesh_of(module) is not None:
            module.unshard()
            for key, param in module.named_parameters(name):
                if param.grad is not None and not is_sharded(param):
                    grads[key] = param.grad.clone()
            module.reshard()
    return grads


# ---- model sharding ----------------------------------------------------------------------------------


def _mesh(module: nn.Module, shard_size: int | str | None) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    world = get_world_size()
    size = get_local_size() if shard_size == "machine" else int(shard_size or world)
    if size < min(2, world) or world % size:
        raise ConfigError(
            f"must be at least 2 and divide the number of processes ({world}), but is {size}", "shard_size"
        )
    device = next(module.parameters()).device.type
    if size == world:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (world // size, size), mesh_dim_names=("replicate", "shard"))


def _shard(model: nn.Module, mesh: DeviceMesh, config: FullyShardedOptions) -> list[Any]:
    """Shard the model in place, and return the modules that gather weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reduce = None if config.param_dtype is None else _DTYPES[config.reduce_dtype]
    lower = None if config.param_dtype is None else _DTYPES[config.param_dtype]
    units: list[Any] = []

    def shard(unit: Any, policy: Any) -> None:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)

    for block in [*_blocks(model, config), model]:
        norms = [
            m for m in block.modules() if lower and isinstance(m, _BatchNorm) and m.affine and m not in units
        ]
        if norms:  # torch requires that these layers' weights have the dtype of their running statistics
            shard(norms, MixedPrecisionPolicy(None, reduce, cast_forward_inputs=False))
        if block not in norms:
            shard(block, MixedPrecisionPolicy(lower, reduce))
        units += [*norms, block]
    return units


def _blocks(model: nn.Module, config: FullyShardedOptions) -> list[nn.Module]:
    """Return the modules that are gathered separately, inner modules first, excluding the model itself."""
    found = _modules_of_class(model, config.wrap) if config.wrap else _large(repeated_blocks(model))
    uses = _uses(model)
    # Exclude blocks that share weights with other modules, because sharding would untie these weights.
    return [m for m in found if m is not model and all(n == uses[p] for p, n in _uses(m).items())]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(param for _, param in model.named_parameters(remove_duplicate=False))


def _inner_first(model: nn.Module) -> list[nn.Module]:
    candidates = [
        m for m in model.modules() if not isinstance(m, _CONTAINERS) and any(True for _ in m.parameters())
    ]
    return candidates[::-1]  # modules() returns a module before its children


def _modules_of_class(model: nn.Module, names: list[str]) -> list[nn.Module]:
    classes = {m: {kind.__name__ for kind in type(m).__mro__} for m in _inner_first(model)}
    for name in names:
        if not any(name in own for own in classes.values()):
            known = {type(m).__name__ for m in classes}
            raise ConfigError(f"the model has no module of class '{name}'{did_you_mean(name, known)}", "wrap")
    return [m for m, own in classes.items() if own & set(names)]


def _large(candidates: list[nn.Module]) -> list[nn.Module]:
    """Return the modules with at least `_MIN_UNIT_SIZE` parameters that are not in a previously selected module."""
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in candidates:
        rest = [param for param in module.parameters() if param not in taken]
        if sum(param.numel() for param in rest) >= _MIN_UNIT_SIZE:
            found.append(module)
            taken.update(rest)
    return found


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, inner blocks first.

    A repeated block is a child of a `ModuleList`, of a `Sequential`, or of a submodule whose children all have the same
    class (not `Sequential`). It has children of its own, and its class occurs at least twice in the container.
    """
    found: set[nn.Module] = set()
    for container in model.modules():
        children = [child for child in container._modules.values() if child is not None]
        kinds = Counter(map(type, children))
        uniform = len(kinds) == 1 and nn.Sequential not in kinds and container is not model
        if uniform or isinstance(container, nn.ModuleList | nn.Sequential):
            found.update(m for m in children if kinds[type(m)] > 1 and any(True for _ in m.children()))
    return [module for module in _inner_first(model) if module in found]
