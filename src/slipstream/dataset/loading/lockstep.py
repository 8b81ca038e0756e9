"""Ranks whose data differ in length: all end their epoch, or their evaluation, at the same batch.

A rank that trains one batch more than another waits forever in its gradient sync. Samplers of this package and
torch's `DistributedSampler` give every rank equally many batches; what others give is not known before it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from slipstream.dataset.loading.loader import length
from slipstream.dataset.loading.samplers import DefaultSampler, EpochBatchSampler, InfiniteSampler
from slipstream.dist import all_gather_object, get_rank, get_world_size
from slipstream.dist.info import flag_device
from slipstream.errors import DataError

__all__ = ["agree_on_length", "until_all_end", "until_one_ends"]

_END = object()


def agree_on_length(loader: DataLoader[Any], warn: Callable[[str], None]) -> int | None:
    """Return the fewest batches that any rank has in an epoch, and cut the loader to them; None if a rank cannot say.

    Every rank calls it.
    """
    lengths = all_gather_object(length(loader))
    if None in lengths:
        return None
    fewest = min(lengths)
    if fewest < max(lengths):
        warn(f"The ranks have {lengths[:8]} batches an epoch: each takes {fewest}, and the rest is not used")
        if isinstance(loader.batch_sampler, EpochBatchSampler):
            loader.batch_sampler.limit = fewest
    return int(fewest)


def until_one_ends(
    batches: Iterable[Any], loader: DataLoader[Any], warn: Callable[[str], None]
) -> Iterator[Any]:
    """Yield the batches of this rank for as long as every rank has one.

    While a batch is used the next is drawn and the ranks ask each other whether they have one: nothing waits but
    the last answer. Loaders known to be of equal length are passed through.
    """
    if get_world_size() == 1 or _known_equal(loader):
        yield from batches
        return
    iterator = iter(batches)
    ahead = next(iterator, _END)
    asked = _ask(ahead is not _END)
    count = 0
    while asked():
        batch, ahead = ahead, next(iterator, _END)
        asked = _ask(ahead is not _END)
        count += 1
        yield batch
    if ahead is not _END:
        warn(
            f"Another rank's data ended after {count} batches, so the epoch ends here; rank {get_rank()} had more. "
            "Give every rank equally many (DefaultSampler does) to use them all"
        )


def until_all_end(loader: DataLoader[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield pairs (batch, whether it counts) until every rank's data have ended; shorter ranks repeat a batch.

    For models whose forward holds collectives, as a sharded one does.

    Raises:
        DataError: a rank has no batch at all, and an iterable data set to take one from.
    """
    iterator = iter(loader)
    batch = last = next(iterator, _END)
    while any(all_gather_object(batch is not _END)):
        if last is _END:
            last = _any_batch(loader)
        yield last, batch is not _END
        batch = next(iterator, _END)
        last = last if batch is _END else batch


def _any_batch(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"rank {get_rank()} has no data to evaluate, but the sharded model needs every rank in each forward: "
            "give every rank at least one batch"
        )
    return next(iter(DataLoader(loader.dataset, batch_size=1, collate_fn=loader.collate_fn)))


def _ask(more: bool) -> Callable[[], bool]:
    """Start asking whether every rank has one more batch; the returned function waits for the answer."""
    flag = torch.tensor(int(more), device=flag_device())
    work = dist.all_reduce(flag, dist.ReduceOp.MIN, async_op=True)

    def answer() -> bool:
        if work is not None:
            work.wait()
        return bool(flag.item())

    return answer


def _known_equal(loader: DataLoader[Any]) -> bool:
    batches = loader.batch_sampler
    inner = batches.batch_sampler if isinstance(batches, EpochBatchSampler) else batches
    if type(inner) is not BatchSampler:
        return False
    sampler = inner.sampler
    equal = isinstance(sampler, InfiniteSampler | DistributedSampler)
    return equal or (isinstance(sampler, DefaultSampler) and sampler.round_up)
