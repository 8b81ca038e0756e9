"""Check a run's data and model before the first training step, and add notes to errors that occur later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from slipstream.dataset.loading.generator_search import find_generators, generator_kind
from slipstream.dataset.loading.loader import batch_size, last_batch_size
from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.dataset.loading.samples import SeededDataset
from slipstream.dist import get_rank, get_world_size
from slipstream.errors import NonFiniteLossError, SlipstreamError
from slipstream.hooks import CheckpointHook
from slipstream.model.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = [
    "add_notes",
    "warn_of_generators",
    "warn_of_sampler_state",
    "warn_of_single_sample",
    "warn_of_unknown_length",
]

_MAX_NAMES = 3
"""Maximum number of random generators that a warning names."""
_NOTES = {
    "find_unused_parameters": "(to enable it, pass cfg=dict(find_unused_parameters=True) to the Runner)",
    "Expected more than 1 value per channel": (
        "(BatchNorm cannot train on one sample with a 1x1 feature map; if this is the incomplete last batch of the "
        "epoch, set train_dataloader.drop_last=True, otherwise increase batch_size)"
    ),
    "is out of bounds.": (  # torch's message about an invalid target ends with these words
        "(a target is not one of the network's classes; give the network more outputs, map the dataset's labels to the "
        "network's classes, or set the loss's ignore_index to the value of targets without a class)"
    ),
    "device-side assert triggered": (
        "(an index on the device is out of range, often a target that is not one of the network's classes; to "
        "see the target in the error message, run on the CPU with CUDA_VISIBLE_DEVICES='')"
    ),
}
"""Maps a part of torch's error message to a note for errors with this message."""


def add_notes(error: Exception, position: str, describe_batch: Callable[[int], str]) -> None:
    """Add notes to an error: the step, a remedy for known torch errors, and the samples in a batch with a non-finite
    loss.

    Args:
        error: an error raised in training or validation.
        position: description of the current step.
        describe_batch: `describe_batch(iteration)` returns the samples in the batch of a step, or an empty string.
    """
    rank = f"on rank {get_rank()} of {get_world_size()}, " if get_world_size() > 1 else ""
    error.add_note(f"({rank}in {position})")
    text = "" if isinstance(error, SlipstreamError) else str(error)
    for part, note in _NOTES.items():
        if part in text:
            error.add_note(note)
    iteration = error.iteration if isinstance(error, NonFiniteLossError) else None
    if iteration is not None and (samples := describe_batch(iteration)):
        error.add_note(f"(the batch of iteration {iteration} contains {samples})")


def warn_of_single_sample(model: nn.Module, loader: DataLoader[Any], warn: Callable[[str], None]) -> None:
    """Warn if the last batch of each epoch has only one sample, because a BatchNorm layer may be unable to train on it.

    Call this function after `model.train()`. BatchNorm layers that remain in evaluation mode are frozen, and accept any
    batch.
    """
    if batch_size(loader) == 1 or last_batch_size(loader) != 1:
        return
    name = next((name for name, module in model.named_modules() if _needs_samples(module)), None)
    if name is not None:
        warn(
            "The last batch of each epoch has one sample. If the feature map at a BatchNorm layer (the first one is "
            f"'{name}') is 1x1, as after global pooling, training stops there with an error; "
            "set train_dataloader.drop_last=True to drop this batch"
        )


def warn_of_unknown_length(runner: Runner) -> None:
    """Warn if accumulation or checkpoints depend on the length of the run and this length is unknown."""
    if runner.knows_length:
        return
    counts = runner.optim_wrapper.accumulative_counts if runner.optim_wrapper is not None else 1
    if counts > 1:
        runner.logger.warning(
            f"The training loader has no length. If the number of batches is not a multiple of accumulate={counts}, "
            "the gradients of the last batches of the run are not applied"
        )
    if any(isinstance(hook, CheckpointHook) and hook.by_epoch is False for hook in runner.hooks):
        runner.logger.warning(
            "The training loader has no length, so CheckpointHook does not save a checkpoint after the last step; set "
            "by_epoch=True"
        )


def warn_of_sampler_state(loader: DataLoader[Any], epoch: int, warn: Callable[[str], None]) -> None:
    """Warn if the order of the loader's sampler depends on state that a resume or a rollback cannot restore.

    Call this function before the epoch in which the run continues. The first indices of this epoch are drawn twice
    and compared. The loader of an iterable dataset has no such sampler, but its persistent workers keep random state.
    """
    batches = loader.batch_sampler
    if not isinstance(batches, EpochBatchSampler):
        if epoch and loader.persistent_workers:
            warn(
                "The training loader's persistent workers keep their random state from one epoch to the next. This "
                "state cannot be restored, so their random numbers will differ from those of an uninterrupted run; set "
                "train_dataloader.persistent_workers=False"
            )
        return
    if state := batches.changed_state() or batches.differing_state(epoch):
        warn(
            f"The training loader's sampler keeps state that cannot be restored ({', '.join(state)}), so the order of "
            "the remaining batches may differ from that in an uninterrupted run; make the sampler compute the order "
            "from the epoch passed to set_epoch()"
        )


def warn_of_generators(model: nn.Module, loader: DataLoader[Any], warn: Callable[[str], None]) -> None:
    """Warn if the unwrapped model or the training dataset has random generators, which a resume cannot restore."""
    dataset = loader.dataset.dataset if isinstance(loader.dataset, SeededDataset) else loader.dataset
    names = [
        *(
            f"{type(module).__name__}.{key}"
            for module in model.modules()
            for key, value in vars(module).items()
            if generator_kind(value) is not None
        ),
        *find_generators([dataset], included=(Dataset, nn.Module)),
    ]
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        warn(
            f"Checkpoints do not contain the state of the random generators {', '.join(names[:_MAX_NAMES])}{more}. "
            "If training draws from them, a resumed run differs from an uninterrupted one; draw from the global "
            "generators of torch, NumPy or Python instead"
        )


def _needs_samples(module: nn.Module) -> bool:
    """Return whether the layer computes its statistics only from this process's samples."""
    synced = isinstance(module, SyncBatchNorm | nn.SyncBatchNorm) and get_world_size() > 1
    return isinstance(module, _BatchNorm) and module.training and not synced
