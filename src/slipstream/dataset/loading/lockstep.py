"""End an epoch or an evaluation at the same batch on all ranks, even if the ranks have different amounts of data.

A rank with more batches than the others would hang in the gradient all-reduce. This package's samplers and torch's
`DistributedSampler` give every rank the same number of batches; for other loaders, the number is not known in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from slipstream.dataset.loading.loader import is_infinite, is_iterable, length, order_of
from slipstream.dataset.loading.samplers import DefaultSampler, InfiniteSampler
from slipstream.dist import all_gather_object, get_rank, get_world_size
from slipstream.dist.info import flag_device
from slipstream.errors import DataError

_END = object()


def agree_on_length(loader: DataLoader[Any], warn: Callable[[str], None]) -> int | None:
    """Return the smallest number of batches per epoch across all ranks.

    If the loader has an `order`, it is limited to this number. The result is None if the length of
    the loader is unknown on at least one rank. Every rank must call this function.
    """
    lengths = all_gather_object(length(loader))
    if None in lengths:
        return None
    shortest = min(lengths)
    if shortest < max(lengths):
        warn(f"The ranks have {lengths[:8]} batches per epoch; each rank uses {shortest} and skips the rest")
        if (order := order_of(loader)) is not None:
            order.limit = shortest
    return int(shortest)


def equal_on_all_ranks(batch: Any) -> bool:
    """Return whether all ranks have the same batch, by checksums of its tensors. Every rank must call this function.

    In large tensors, only every n-th value is read, because the checksum needs 16 bytes for each value.
    """
    sums = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_complex():
            values = leaf.detach().flatten()[:: max(1, leaf.numel() // 10**6)].cpu().double()
            sums.append(float(values @ torch.arange(1, len(values) + 1, dtype=torch.float64)))
    return bool(sums) and len(set(map(tuple, all_gather_object(sums)))) == 1


def check_complete(loader: DataLoader[Any], name: str, batches: int, expected: int | None) -> None:
    """Raise a DataError if a pass over `loader` ended too early.

    A pass must have at least `expected` batches, unless `expected` is None. With an endless sampler, a pass must not
    end.
    """
    streamed = is_iterable(loader)
    # With `drop_last`, each worker drops the incomplete last batch of its own shard of an iterable dataset.
    tolerance = max(loader.num_workers - 1, 0) if streamed and loader.drop_last else 0
    if not is_infinite(loader) and (expected is None or batches >= expected - tolerance):
        return
    total = "an endless number of" if is_infinite(loader) else expected
    raise DataError(
        f"{name} ended after {batches} of {total} batches; correct the length of the dataset or sampler, or find the "
        "StopIteration that ended it. An iterable dataset without a length may end at any time"
    )


def until_one_ends(
    batches: Iterable[Any], loader: DataLoader[Any], warn: Callable[[str], None]
) -> Iterator[Any]:
    """Yield this rank's batches until any rank runs out of batches.

    Before a batch is yielded, the next batch is drawn and an asynchronous all-reduce is started, which checks whether
    every rank has a next batch. Loaders that are known to have the same length on every rank need no all-reduce.
    """
    if get_world_size() == 1 or _has_equal_lengths(loader):
        yield from batches
        return
    iterator = iter(batches)
    next_batch = next(iterator, _END)
    all_have_next = _start_all_have_next(next_batch is not _END)
    count = 0
    while all_have_next():
        batch, next_batch = next_batch, next(iterator, _END)
        all_have_next = _start_all_have_next(next_batch is not _END)
        count += 1
        yield batch
    if next_batch is not _END:
        warn(
            f"The epoch ended after batch {count} because another rank ran out of data; rank {get_rank()} has unused "
            "batches. To use them all, give every rank the same number of batches (for example, with DefaultSampler)"
        )


def until_all_end(batches: Iterable[Any], loader: DataLoader[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, is_new) pairs until no rank has data left; ranks with less data repeat a batch.

    Use this function for models whose forward pass runs collectives, such as sharded models.

    Args:
        batches: the batches of one pass over `loader`.
        loader: the loader.

    Raises:
        DataError: a rank has no batch, and its dataset is iterable, so there is no sample to repeat.
    """
    iterator = iter(batches)
    batch = last = next(iterator, _END)
    while any(all_gather_object(batch is not _END)):
        if last is _END:
            last = _any_batch(loader)
        yield last, batch is not _END
        batch = next(iterator, _END)
        last = last if batch is _END else batch


def _any_batch(loader: DataLoader[Any]) -> Any:
    if is_iterable(loader):
        raise DataError(f"rank {get_rank()} has no data; a sharded model requires a batch on each rank")
    dataset: Any = loader.dataset
    return loader.collate_fn([dataset[0]])


def _start_all_have_next(has_next: bool) -> Callable[[], bool]:
    """Start an all-reduce of `has_next`.

    Return a function that waits for the all-reduce and returns whether every rank has a next batch.
    """
    flag = torch.tensor(int(has_next), device=flag_device())
    work = dist.all_reduce(flag, dist.ReduceOp.MIN, async_op=True)

    def wait() -> bool:
        if work is not None:
            work.wait()
        return bool(flag.item())

    return wait


def _has_equal_lengths(loader: DataLoader[Any]) -> bool:
    owner: Any = order_of(loader) or loader
    if type(owner.batch_sampler) is not BatchSampler:
        return False
    sampler = owner.sampler
    equal = isinstance(sampler, InfiniteSampler | DistributedSampler)
    return equal or (isinstance(sampler, DefaultSampler) and sampler.round_up)
