"""Roll back to the last good checkpoint of a run after a fault, and skip the batches that caused the fault."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream.checkpoint import mark_last_checkpoint
from slipstream.dataset.loading.order import EpochOrder, batch_indices
from slipstream.dist import all_gather_object, broadcast_object_list, get_world_size, is_main_process
from slipstream.errors import CheckpointError, LossSpikeError, NonFiniteLossError
from slipstream.model import unwrap_model
from slipstream.model.wrappers import drop_unsharded_gradients
from slipstream.optim import OptimWrapper
from slipstream.runner import resume
from slipstream.step import CompiledStep, EagerStep
from slipstream.typecheck import matches

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = ["Passes", "Rollback"]

Fault = NonFiniteLossError | LossSpikeError
_KEY = "rollback"
_MAX_CHECKPOINTS = 100
"""Maximum number of this run's checkpoints to remember."""
_MAX_INDICES = 1000
"""Maximum number of sample indices in a message."""
_MAX_LOGGED_BATCHES = 20
"""Maximum number of skipped batches whose samples are logged."""


class Passes:
    """Records the recent passes over a training loader, so that the samples in a step can be determined.

    Args:
        loader: the training loader.
        count: number of passes to store.
    """

    def __init__(self, loader: DataLoader[Any], count: int) -> None:
        self._loader = loader
        self._passes: deque[tuple[int, int, int, int]] = deque(maxlen=count)
        self._order = EpochOrder()

    def begin(self, steps_done: int, epoch: int, start: int, used_samples: int = 0) -> None:
        """Record the start of a pass.

        Args:
            steps_done: number of steps before the pass.
            epoch: index of the epoch or pass.
            start: index of the first batch.
            used_samples: number of samples to skip in the first batch, because they have already been used.
        """
        # Remove the passes that the run repeats after a rollback.
        while self._passes and self._passes[-1][0] >= steps_done:
            self._passes.pop()
        self._passes.append((steps_done, epoch, start, used_samples))
        self._order = EpochOrder()  # release the memory

    def has_begun(self, epoch: int) -> bool:
        """Return whether the newest pass belongs to this epoch."""
        return bool(self._passes) and self._passes[-1][1] == epoch

    def samples(self, iteration: int) -> list[int] | None:
        """Return the indices of this rank's samples in step `iteration` (from 1), or None if they are unknown."""
        index = bisect.bisect_left(self._passes, (iteration, -1, -1, -1)) - 1
        if index < 0:
            return None
        steps_done, epoch, start, used_samples = self._passes[index]
        indices = batch_indices(self._loader, epoch, start + iteration - 1 - steps_done, self._order)
        return indices if indices is None or iteration > steps_done + 1 else indices[used_samples:]


class _Policy(NamedTuple):
    max_rollbacks: int
    skip_before: int


class Rollback:
    """Restores the state of a run from its last good checkpoint, and skips the batches that caused a fault.

    A checkpoint is written only after all losses up to its step have been read and all weights have been checked, so a
    checkpoint written before the first bad loss is usually good. A non-finite or high loss can be caused by its own
    batch, or by the previous update. Therefore, the run skips the batches of the step with the bad loss and of the
    preceding step. With gradient accumulation, the run skips the accumulation window that contains the bad loss, and
    the preceding window.

    A checkpoint that was written between the bad update and the bad loss contains weights that are large but finite. In
    this case, the next loss after the rollback is also bad. Therefore, if a fault occurs directly after skipped steps,
    the run also skips the update before these steps, and rolls back to a checkpoint written before this update. If
    there is no such checkpoint, the newest checkpoint is used again, until `max_rollbacks` is reached.

    A skipped batch still counts as a step: iterations, epochs, schedules and the order of the data stay the
    same as in a run without a fault. The weights are not updated for the accumulation window that contains this batch.

    Args:
        runner: the Runner whose state is restored.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._policies: dict[type[Fault], _Policy] = {}
        self._saved: deque[tuple[int, Path]] = deque(maxlen=_MAX_CHECKPOINTS)
        self._buffers: dict[str, Tensor] = {}
        self._count = 0
        self._ranges: list[tuple[int, int]] = []
        self.skipped: frozenset[int] = frozenset()
        """The steps (counted from 1) whose batches are skipped."""

    # ---- faults and checkpoints ------------------------------------------------------------------------

    def enable(self, kind: type[Fault], max_rollbacks: int, skip_before: int) -> None:
        """Recover from errors of this class, at most `max_rollbacks` times in a run.

        Each recovery skips `skip_before` steps in addition to those that are always skipped.
        """
        self._policies[kind] = _Policy(max_rollbacks, skip_before)

    def disable(self, kind: type[Fault]) -> None:
        """Stop the run on errors of this class."""
        self._policies.pop(kind, None)

    @property
    def faults(self) -> tuple[type[Fault], ...]:
        """The classes of the errors from which the run recovers."""
        return tuple(self._policies)

    @property
    def oldest_iteration(self) -> int | None:
        """The iteration of the oldest checkpoint to which the run can roll back, or None if it cannot roll back."""
        if not self._policies:
            return None
        return min((iteration for iteration, path in self._saved if path.exists()), default=None)

    def begin(self) -> None:
        """Copy the buffers that are not saved in checkpoints and that a resumed run initializes again."""
        if not self._policies:
            return
        core = unwrap_model(self._runner.model)
        saved = core.state_dict().keys()
        self._buffers = {name: b.detach().clone() for name, b in core.named_buffers() if name not in saved}

    def add(self, iteration: int, path: Path) -> None:
        """Store the path of a complete checkpoint of this run, written after `iteration` steps."""
        others = (entry for entry in self._saved if entry[1] != path)  # the file at this path was replaced
        self._saved = deque((*others, (iteration, path)), maxlen=_MAX_CHECKPOINTS)

    def agree(self, error: NonFiniteLossError | None) -> NonFiniteLossError | None:
        """Return the earliest error on any rank, or None if no rank has an error. All ranks must call this method.

        The result is the same on every rank.
        """
        if get_world_size() == 1:
            return error
        own_error = None if error is None else (error.iteration or 0, str(error), error.located)
        errors = [
            (*other, rank) for rank, other in enumerate(all_gather_object(own_error)) if other is not None
        ]
        if not errors:
            return None
        iteration, text, located, rank = min(errors, key=lambda entry: (entry[0], entry[3]))
        return NonFiniteLossError(f"on rank {rank}: {text}", iteration, located)

    # ---- recover -----------------------------------------------------------------------------------------

    def recover(self, error: Fault) -> None:
        """Restore the last good checkpoint, and skip the batches that caused `error`. All ranks must call this method.

        Raises:
            NonFiniteLossError, LossSpikeError: there is no good checkpoint, or `max_rollbacks` has been reached.
            CheckpointError: a checkpoint cannot be restored.
        """
        runner, policy = self._runner, self._policies[type(error)]
        assert error.iteration is not None
        try:
            runner.wait_for_checkpoint()
        except CheckpointError as failure:  # use the previous checkpoint
            runner.logger.error(str(failure))
        if self._count >= policy.max_rollbacks:
            error.args = (
                f"{error}. The maximum number of rollbacks has been reached "
                f"(max_rollbacks={policy.max_rollbacks}); fix the cause, or increase max_rollbacks",
            )
            raise error
        first, last, follows_skipped = self._range(error, policy.skip_before)
        earlier = policy.skip_before or follows_skipped
        target = self._choose(error.iteration - 1, first - 1 if earlier else error.iteration - 1)
        if target is None:
            error.args = (
                f"{error}. The run cannot be rolled back, because there is no complete checkpoint before "
                f"iteration {error.iteration}; save checkpoints more often (default_hooks.checkpoint.interval)",
            )
            raise error
        located = isinstance(error, LossSpikeError) or error.located
        first = max(first, target[0] + 1) if located else target[0] + 1
        ranges, count = [*self._ranges, (first, last)], self._count + 1
        runner.logger.warning(
            f"{error}. Rolling back to {target[1]} (iteration {target[0]}; rollback {count} of at most "
            f"{policy.max_rollbacks}). Training continues without {_format_batches(first, last)}"
        )
        self._log_samples(first, last)
        self._restore(target[1], target[2])
        self._set(ranges, count)
        runner.call_hook("after_rollback")

    def _range(self, error: Fault, skip_before: int) -> tuple[int, int, bool]:
        """Return the first and the last step to skip, and whether the fault directly follows skipped steps.

        A fault that follows skipped steps may have been caused by the update before them, if that update made the
        weights large but finite. In this case, a checkpoint written after this update is not good, so the run rolls
        back further and also skips this update.
        """
        assert error.iteration is not None
        optim = self._runner.optim_wrapper
        assert optim is not None
        window = optim.accumulative_counts
        end = error.last if isinstance(error, LossSpikeError) else error.iteration
        first = ((error.iteration - 1) // window - 1) * window + 1
        previous = first
        while any(step in self.skipped for step in range(first - window, first + window)):
            first -= window
        last = ((end - 1) // window + 1) * window
        return first - skip_before, min(last, self._runner.max_iters), first < previous

    def _choose(self, max_steps: int, preferred: int) -> tuple[int, Path, dict[str, Any]] | None:
        """Return the newest intact checkpoint that was written after at most `preferred` steps.

        If there is none, return the newest intact checkpoint that was written after at most `max_steps` steps.

        Returns:
            The number of steps, the path and the contents, or None if no checkpoint is intact.
        """
        candidates: list[Any] = [None]
        if is_main_process():
            candidates = [[entry for entry in self._saved if entry[0] <= max_steps and entry[1].exists()]]
        broadcast_object_list(candidates)
        newest = list(reversed(candidates[0]))
        matching = [entry for entry in newest if entry[0] <= preferred]
        for iteration, path in [*matching, *(entry for entry in newest if entry not in matching)]:
            checkpoint, problem = resume.read_if_intact(unwrap_model(self._runner.model), path)
            if checkpoint is not None:
                return iteration, path, checkpoint
            self._runner.logger.warning(f"{problem}; trying an earlier checkpoint")
        return None

    def _log_samples(self, first: int, last: int) -> None:
        for iteration in range(first, min(last, first + _MAX_LOGGED_BATCHES - 1) + 1):
            if text := self.describe(iteration, all_ranks=True):
                self._runner.logger.warning(f"The batch of iteration {iteration} contains {text}")

    def describe(self, iteration: int, all_ranks: bool = False) -> str:
        """Return the sample indices in the batch of a step, or an empty string if they cannot be computed.

        Args:
            iteration: the step, counted from 1.
            all_ranks: whether to include the samples of the other ranks, which must then also call this method.
        """
        samples = self._runner.train_loop.passes.samples(iteration)
        parts = all_gather_object(samples) if all_ranks else [samples]
        if None in parts:
            return ""
        if len(parts) == 1:
            return f"samples {_format_indices(parts[0])}"
        return "; ".join(f"samples {_format_indices(part)} on rank {rank}" for rank, part in enumerate(parts))

    def _restore(self, path: Path, checkpoint: dict[str, Any]) -> None:
        runner = self._runner
        core = unwrap_model(runner.model)
        optim, resumed_from = runner.optim_wrapper, runner.checkpoints.resumed_from
        assert optim is not None
        drop_unsharded_gradients(core)
        optim.zero_grad()  # drop the gradients of an unfinished accumulation window
        runner.message_hub.drop_saved()
        runner.checkpoints.restore(checkpoint, path)
        runner.checkpoints.resumed_from = resumed_from
        runner.meter.newest = runner.iter
        runner.checkpoints.restore_counts()
        for name, initial in self._buffers.items():
            _restore_buffer(core, name, initial)
        runner.train_loop.stop_training = False
        newer = [entry for entry in self._saved if entry[0] > runner.iter]
        if newer:
            self._saved = deque(
                (entry for entry in self._saved if entry not in newer), maxlen=_MAX_CHECKPOINTS
            )
            if is_main_process():  # if the run is killed now, it must not resume from a newer checkpoint
                mark_last_checkpoint(runner.work_dir, path, runner.checkpoints.run_id, runner.iter)

    # ---- skipped batches ---------------------------------------------------------------------------------

    def _set(self, ranges: Sequence[tuple[int, int]], count: int) -> None:
        self._ranges, self._count = list(ranges), count
        self.skipped = frozenset(i for first, last in ranges for i in range(first, last + 1))
        info = {
            "count": count,
            "skipped": [list(pair) for pair in ranges],
            "samples_per_step": self._runner.samples_per_step,
        }
        self._runner.message_hub.update_info(_KEY, info)

    def load(self) -> None:
        """Restore the resumed run's list of rollbacks from the message hub."""
        runner, info = self._runner, self._runner.message_hub.get_info(_KEY)
        self._ranges, self._count, self.skipped = [], 0, frozenset()
        if not _is_valid(info):
            if info is not None:
                runner.logger.warning(
                    "The checkpoint's list of rollbacks is damaged and will be ignored, so the batches that were "
                    "skipped after rollbacks will be used again"
                )
            return
        if info["samples_per_step"] != runner.samples_per_step and info["skipped"]:
            runner.logger.warning(
                "The batch size has changed since the run was rolled back, so the skipped batches will be used again"
            )
            info = {**info, "skipped": []}
        self._set([(first, last) for first, last in info["skipped"]], info["count"])

    def skip(self) -> None:
        """Count a batch without training on it, and drop the gradients of its accumulation window."""
        runner = self._runner
        optim = runner.optim_wrapper
        # A model that overrides `train_step` counts its own batches.
        if isinstance(runner.step, EagerStep | CompiledStep) and isinstance(optim, OptimWrapper):
            drop_unsharded_gradients(unwrap_model(runner.model))
            optim.zero_grad()
            optim.count_batch()


def _restore_buffer(core: nn.Module, name: str, initial: Tensor) -> None:
    """Restore a buffer in place, or replace it if its shape or dtype has changed (for example, a growing cache)."""
    owner, _, leaf = name.rpartition(".")
    buffers = core.get_submodule(owner)._buffers
    current = buffers.get(leaf)
    if current is None or (current.shape, current.dtype) != (initial.shape, initial.dtype):
        buffers[leaf] = initial.clone()
    else:
        current.detach().copy_(initial)


def _is_valid(info: Any) -> bool:
    return (
        isinstance(info, dict)
        and matches(info.get("count"), int)
        and matches(info.get("samples_per_step"), int)
        and matches(info.get("skipped"), list[list[int]])
        and all(len(pair) == 2 and 0 <= pair[1] - pair[0] <= 10**6 for pair in info["skipped"])
    )


def _format_batches(first: int, last: int) -> str:
    return (
        f"the batch of iteration {first}" if first == last else f"the batches of iterations {first} to {last}"
    )


def _format_indices(indices: list[int]) -> str:
    rest = len(indices) - _MAX_INDICES
    text = ", ".join(str(int(index)) for index in indices[:_MAX_INDICES])
    return f"{text} and {rest} more" if rest > 0 else text
