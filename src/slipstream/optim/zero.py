"""ZeRO-1: each process stores the optimizer state of its partition of the parameters."""

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
from slipstream.errors import ConfigError
from slipstream.registry import OPTIMIZERS
from slipstream.sharding import is_sharded

# Keys of a parameter group that are not optimizer options.
_NON_OPTIONS = ("params", "param_names")


@OPTIMIZERS.register_module()
class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer whose state is partitioned across the processes (Rajbhandari et al. 2020, stage 1).

    Each parameter belongs to one process. The largest parameters are assigned first, each to the process with the
    fewest elements. In each step, every process updates the parameters in its partition and gathers all other
    parameters, which requires memory for another copy of the parameters. With one process, the class behaves like the
    inner optimizer. The inner optimizer must update each parameter independently, as torch's optimizers do.

    `state_dict` has the format of the inner optimizer, so a run can resume with any number of processes, or with the
    inner optimizer alone. torch's class of the same name requires all parameters to have the same dtype, and its state
    is available on only one rank, after a call to `consolidate_state_dict`.

    Args:
        params: parameters or parameter groups.
        optimizer_type: name or class of the inner optimizer.
        kwargs: options of the inner optimizer.

    Raises:
        ConfigError: the parameters are already sharded (FSDP).
    """

    def __init__(self, params: Any, optimizer_type: str | type[Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {})
        tensors = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if any(map(is_sharded, tensors)):
            raise ConfigError(
                f"FSDP already shards the optimizer state; use {optimizer_type!r} instead", "type"
            )
        self._partitions: list[list[Tensor]] = [[] for _ in range(get_world_size())]
        self._assign(tensors)
        own = [self._own(group) for group in self.param_groups]
        self.optim: Optimizer = OPTIMIZERS.build({"type": optimizer_type, "params": own, **kwargs})
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)

    def _assign(self, tensors: list[Tensor]) -> None:
        """Assign each tensor to a rank's partition."""
        sizes = [sum(map(Tensor.numel, partition)) for partition in self._partitions]
        for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
            rank = sizes.index(min(sizes))
            self._partitions[rank].append(tensor)
            sizes[rank] += tensor.numel()

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the group that contains only the parameters in this rank's partition."""
        mine = {id(p) for p in self._partitions[get_rank()]}
        options = {key: value for key, value in group.items() if key not in _NON_OPTIONS}
        return {"params": [p for p in group["params"] if id(p) in mine], **options}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each process's partition, and gather all parameters on every process."""
        _copy_options(self.param_groups, self.optim.param_groups)  # a scheduler may have changed the options
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._gather_parameters()
        return loss

    def _gather_parameters(self) -> None:
        if len(self._partitions) == 1:
            return
        tensors = list(chain.from_iterable(self._partitions))
        for dtype in dict.fromkeys(p.dtype for p in tensors):
            partitions = [[p for p in partition if p.dtype == dtype] for partition in self._partitions]
            longest = max(sum(map(Tensor.numel, partition)) for partition in partitions)
            flat = torch.empty(len(partitions) * longest, dtype=dtype, device=tensors[0].device)
            parts = flat.split(longest)
            mine = partitions[get_rank()]
            for slot, p in zip(_slots(parts[get_rank()], mine), mine, strict=True):
                slot.copy_(p)
            dist.all_gather(list(parts), parts[get_rank()])
            for partition, part in zip(partitions, parts, strict=True):
                if partition and partition is not mine:
                    torch._foreach_copy_(partition, _slots(part, partition))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and partition it. All ranks must call this method."""
        super().add_param_group(param_group)
        if hasattr(self, "optim"):  # False during construction
            self._assign(self.param_groups[-1]["params"])
            self.optim.add_param_group(self._own(self.param_groups[-1]))

    def state_dict(self) -> dict[str, Any]:
        """Return the full state on rank 0, and only the rank's own partition on the other ranks.

        With several processes, the returned tensors are on the CPU. All ranks must call this method.
        """
        own = super().state_dict()
        if len(self._partitions) > 1:
            own["state"] = self._gather_state(own["state"])
        return own

    def _gather_state(self, state: dict[int, Any]) -> dict[int, Any]:
        """Gather the states of all ranks on rank 0. The ranks send their states one at a time, to limit memory use."""
        state = tree_map_only(Tensor, lambda t: t.cpu(), state)
        for source in range(1, len(self._partitions)):
            if get_rank() == source:
                dist.send_object_list([state], dst=0)
            elif get_rank() == 0:
                received: list[Any] = [None]
                dist.recv_object_list(received, src=source)
                state |= received[0]
        return dict(sorted(state.items()))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's partition of the state from a `state_dict` of this class or of the inner optimizer."""
        mine = {id(p) for p in self._partitions[get_rank()]}
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = {index for index, p in zip(indices, parameters, strict=False) if id(p) in mine}
        state = {index: value for index, value in state_dict["state"].items() if index in own}
        super().load_state_dict({**state_dict, "state": state})
        self.optim.state = self.state
        _copy_options(self.param_groups, self.optim.param_groups)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update((key, value) for key, value in source_group.items() if key not in _NON_OPTIONS)


def _slots(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """For each tensor, return a view into `flat` with the tensor's shape."""
    sizes = [t.numel() for t in tensors]
    return [part.view(t.shape) for part, t in zip(flat[: sum(sizes)].split(sizes), tensors, strict=True)]
