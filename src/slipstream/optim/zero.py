"""ZeRO-1: each process keeps the optimizer's state of its share of the parameters only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from slipstream.dist import get_rank, get_world_size
from slipstream.dist.sharding import is_sharded
from slipstream.errors import ConfigError
from slipstream.registry import OPTIMIZERS

__all__ = ["ZeroRedundancyOptimizer"]

_NAMING = ("params", "param_names")
"""What a group says of its parameters, not how they are moved."""


@OPTIMIZERS.register_module()
class ZeroRedundancyOptimizer(Optimizer):
    """Any optimizer with its state parted among the processes (Rajbhandari et al. 2020, stage 1).

    Each parameter as a whole belongs to one process, the largest first to the one that holds least. A step
    moves the own parameters and gathers the others', which takes room for one more copy of the parameters.
    With one process it is the optimizer itself. It suits optimizers that treat each parameter by itself,
    as all of torch's do.

    `state_dict` is that of the plain optimizer, so that runs may go on with any number of processes, and with
    the plain optimizer. torch's class of this name cannot be used for that: it wants parameters of one dtype,
    and its state exists on one rank, after a call of its own.

    Args:
        params: parameters, or groups of them with options of their own.
        optimizer_type: name or class of the optimizer that each process runs on its share.
        kwargs: its options.

    Raises:
        ConfigError: parameters that are sharded already (FSDP).
    """

    def __init__(self, params: Any, optimizer_type: str | type[Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {})
        tensors = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if any(map(is_sharded, tensors)):
            raise ConfigError(f"FSDP shards the optimizer's state already: take {optimizer_type!r}", "type")
        self._shares: list[list[Tensor]] = [[] for _ in range(get_world_size())]
        self._part(tensors)
        own = [self._own(group) for group in self.param_groups]
        self.optim: Optimizer = OPTIMIZERS.build({"type": optimizer_type, "params": own, **kwargs})
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)

    def _part(self, tensors: list[Tensor]) -> None:
        """Add each of the tensors to a rank's share."""
        sizes = [sum(map(Tensor.numel, share)) for share in self._shares]
        for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
            least = sizes.index(min(sizes))
            self._shares[least].append(tensor)
            sizes[least] += tensor.numel()

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with this rank's share of its parameters."""
        mine = {id(p) for p in self._shares[get_rank()]}
        options = {key: value for key, value in group.items() if key not in _NAMING}
        return {"params": [p for p in group["params"] if id(p) in mine], **options}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every process's share of the parameters, and give each process all of them."""
        _copy_options(self.param_groups, self.optim.param_groups)  # a schedule may have changed them
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._gather_parameters()
        return loss

    def _gather_parameters(self) -> None:
        if len(self._shares) == 1:
            return
        tensors = list(chain.from_iterable(self._shares))
        for dtype in dict.fromkeys(p.dtype for p in tensors):
            shares = [[p for p in share if p.dtype == dtype] for share in self._shares]
            longest = max(sum(map(Tensor.numel, share)) for share in shares)
            everything = torch.empty(len(shares) * longest, dtype=dtype, device=tensors[0].device)
            parts = everything.split(longest)
            for slot, p in zip(_slots(parts[get_rank()], mine := shares[get_rank()]), mine, strict=True):
                slot.copy_(p)
            dist.all_gather(list(parts), parts[get_rank()])
            for share, part in zip(shares, parts, strict=True):
                if share and share is not mine:
                    torch._foreach_copy_(share, _slots(part, share))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on every rank alike, and part it too."""
        super().add_param_group(param_group)
        if hasattr(self, "optim"):  # otherwise it is one of the first groups
            self._part(self.param_groups[-1]["params"])
            self.optim.add_param_group(self._own(self.param_groups[-1]))

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state, whole on rank 0 (on the CPU), the own share elsewhere.

        Call it on every rank.
        """
        own = super().state_dict()
        if len(self._shares) > 1:
            own["state"] = self._gather_state(own["state"])
        return own

    def _gather_state(self, state: dict[int, Any]) -> dict[int, Any]:
        """Return all ranks' states on rank 0, one rank's after another's to bound the memory."""
        state = tree_map_only(Tensor, lambda t: t.cpu(), state)
        for source in range(1, len(self._shares)):
            if get_rank() == source:
                dist.send_object_list([state], dst=0)
            elif get_rank() == 0:
                received: list[Any] = [None]
                dist.recv_object_list(received, src=source)
                state |= received[0]
        return dict(sorted(state.items()))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the own share of what `state_dict` of this class or of the plain optimizer returned."""
        mine = {id(p) for p in self._shares[get_rank()]}
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = {number for number, p in zip(numbers, parameters, strict=False) if id(p) in mine}
        state = {number: value for number, value in state_dict["state"].items() if number in own}
        super().load_state_dict({**state_dict, "state": state})
        self.optim.state = self.state
        _copy_options(self.param_groups, self.optim.param_groups)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        ours.update((key, value) for key, value in theirs.items() if key not in _NAMING)


def _slots(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return a view into `flat` for each of the tensors, in its shape."""
    sizes = [t.numel() for t in tensors]
    return [part.view(t.shape) for part, t in zip(flat[: sum(sizes)].split(sizes), tensors, strict=True)]
