"""Loops for training (epoch-based or iteration-based), validation and testing."""

from __future__ import annotations

import bisect
import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from slipstream.checkpoint import get_random_state
from slipstream.config import add_config_path
from slipstream.dataset.loading.feed import DeviceFeed, can_draw_ahead
from slipstream.dataset.loading.loader import (
    BatchSizes,
    batch_size,
    build_dataloader,
    can_seek,
    can_start_inside_batch,
    dataset_size,
    is_infinite,
    length,
    loaders_of,
    order_of,
    samples_per_epoch,
    set_dataset_epoch,
)
from slipstream.dataset.loading.lockstep import (
    agree_on_length,
    check_complete,
    until_all_end,
    until_one_ends,
)
from slipstream.dataset.loading.stateful import LoaderState
from slipstream.dataset.loading.workers import Loading, end_workers, explain_worker_errors
from slipstream.dist import get_rank, get_world_size, report_progress
from slipstream.errors import ConfigError, DataError
from slipstream.evaluator import Evaluator
from slipstream.logging import Phase
from slipstream.model import unwrap_model
from slipstream.model.sync_batchnorm import average_batchnorm
from slipstream.optim import OptimWrapperDict
from slipstream.optim.scheduler import INF
from slipstream.registry import EVALUATOR, LOOPS
from slipstream.typecheck import NonNegativeInt, PositiveInt, PositiveIntOrFraction, check, short_repr

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

Loadable = DataLoader[Any] | Mapping[str, Any] | Iterable[Any]


class BaseLoop:
    """A loop over a data loader.

    Args:
        runner: the Runner that owns the loop.
        dataloader: a loader or its configuration.
    """

    mode = "train"
    loading: Loading | None = None
    """The current pass over the loader."""

    def __init__(self, runner: Runner, dataloader: Loadable) -> None:
        self._runner = runner
        self.dataloader = self._build(dataloader)

    def _build(self, dataloader: Loadable) -> DataLoader[Any]:
        loader = build_dataloader(dataloader, self._runner.seed, self._name, training=self.mode == "train")
        return self._runner.limits.apply(loader, self.mode, self._name)

    @property
    def runner(self) -> Runner:
        """The Runner that owns this loop."""
        return self._runner

    @property
    def _name(self) -> str:
        """Name of the Runner argument that specifies the loader."""
        return f"{self.mode}_dataloader"

    def run(self) -> Any:
        """Run the whole loop."""
        raise NotImplementedError

    def _load(self, epoch: int = 0) -> Loading:
        """Start a pass over the loader. The random numbers of its workers depend only on (seed, epoch)."""
        if self.loading is not None:
            self.loading.close()
        self.loading = Loading(self.dataloader, self._name, (self._runner.seed, epoch))
        return self.loading

    def end_loading(self) -> None:
        """Stop all worker processes of the loaders."""
        if self.loading is not None:
            self.loading.close()
            self.loading = None
        for loader in loaders_of(self):
            end_workers(loader)


class _TrainLoop(BaseLoop):
    """Base class of the training loops. It runs the training step and schedules validation."""

    # Whether training is epoch-based.
    counts_epochs = True
    # Number of validation runs in an epoch, including the one at its end.
    validations_per_epoch = 1
    max_epochs: int
    max_iters: int

    def __init__(
        self,
        runner: Runner,
        dataloader: Loadable,
        val_begin: int,
        val_interval: int,
        dynamic_intervals: Sequence[tuple[int, int]] | None,
    ) -> None:
        super().__init__(runner, dataloader)
        # Number of batches per epoch, the same on every rank; None if it is unknown on any rank.
        self.epoch_length = agree_on_length(self.dataloader, runner.logger.warning)
        self._length = length(self.dataloader)
        self._resumed_at: Mapping[str, Any] | None = None
        check(val_begin, NonNegativeInt, "val_begin")
        check(val_interval, PositiveInt, "val_interval")
        self.val_begin = val_begin
        self._milestones = [0, *(milestone for milestone, _ in dynamic_intervals or ())]
        self._intervals = [val_interval, *(interval for _, interval in dynamic_intervals or ())]
        if self._milestones != sorted(self._milestones) or min(self._intervals) < 1:
            raise ConfigError(
                "must be pairs (milestone, interval) with ascending milestones and intervals of at least 1, not "
                f"{dynamic_intervals!r}",
                "train_cfg.dynamic_intervals",
            )
        # Whether to stop after the current epoch, or after the current step if training is iteration-based.
        self.stop_training = False
        # Whether to stop after the current step, in the middle of an epoch.
        self.stop_now = False
        # Whether an epoch (or pass over the data) has begun but is not counted yet.
        self.in_epoch = False
        self._epoch = self._iter = self._start = 0
        # Number of this rank's samples in the next batch that were used before the resume.
        self._used_samples = 0
        self._validated = True
        # Random state at the start of an incomplete validation.
        self._validation_start: dict[str, Any] | None = None
        # Modules that the model's `train` method puts into evaluation mode.
        self._frozen_by_model: set[torch.nn.Module] = set()
        # Modules that were in evaluation mode before the validation.
        self._kept_in_eval: list[torch.nn.Module] = []
        self._sizes, self._world_size = BatchSizes(self.dataloader), get_world_size()
        self.loader_state = LoaderState(self.dataloader)
        # Number of samples in the latest step, summed over all processes.
        self.step_samples = 0
        # Number of finished batches in the current epoch (or pass over the data).
        self.inner_iter = 0

    @property
    def epoch(self) -> int:
        """Number of finished epochs (passes over the data)."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Number of finished steps."""
        return self._iter

    @property
    def validated(self) -> bool:
        """Whether the last validation that was due has run, before or after a resume; True if none was due."""
        return self._validated

    @property
    def val_interval(self) -> int:
        """Number of epochs or iterations between validation runs, at the current point in training."""
        return self._interval_at(self._progress)

    def _interval_at(self, progress: int) -> int:
        return self._intervals[bisect.bisect_right(self._milestones, progress) - 1]

    def _is_due(self, progress: int) -> bool:
        """Return whether to validate after this number of epochs or iterations."""
        on_schedule = progress % self._interval_at(progress) == 0 or progress == self._goal
        return self._runner.val_loop is not None and progress >= self.val_begin and on_schedule

    def _is_due_within_epoch(self) -> bool:
        """Return whether to validate after the last batch, before the epoch ends."""
        batch, runs, total = self.inner_iter, self.validations_per_epoch, self.epoch_length
        if runs == 1 or total is None or batch >= total or self._epoch + 1 < self.val_begin:
            return False
        return batch * runs // total > (batch - 1) * runs // total

    @property
    def _progress(self) -> int:
        raise NotImplementedError

    @property
    def _goal(self) -> int:
        raise NotImplementedError

    @property
    def samples_per_step(self) -> int:
        """Number of samples in a full batch, summed over all processes."""
        return (batch_size(self.dataloader) or 1) * get_world_size()

    def position(self, by_epoch: bool | None) -> dict[str, Any]:
        """Return the training position to save in a checkpoint.

        Args:
            by_epoch: True at the end of an epoch that is not yet counted, False after a step that is not yet
                counted, None if the counters are up to date.
        """
        ends_epoch = bool(by_epoch) and self.counts_epochs
        before_validation = by_epoch is self.counts_epochs  # at the end of an epoch or step
        validated = not self._is_due(self._progress + 1) if before_validation else self._validated
        if by_epoch is False and self._is_due_within_epoch():
            validated = False
        return {
            "epoch": self._epoch + ends_epoch,
            "iter": self._iter + (1 if by_epoch is False else 0),
            "inner_samples": 0 if ends_epoch else self.inner_iter * self.samples_per_step,
            "samples_per_step": self.samples_per_step,
            "epoch_length": self.epoch_length,
            "validated": validated,
        }

    @property
    def random_state(self) -> dict[str, Any]:
        """The random state to save in a checkpoint; a resumed run repeats an incomplete validation from its start."""
        return self._validation_start or self._runner.checkpoints.random_state or get_random_state()

    def resume_at(self, position: Mapping[str, Any]) -> None:
        """Continue at a saved position. If the number of samples per step has changed, convert the position."""
        self._resumed_at = position
        samples, warn = self.samples_per_step, self._runner.logger.warning
        saved_samples = position.get("samples_per_step", samples)
        epoch, iteration = position["epoch"], position["iter"]
        done = iteration * saved_samples if is_infinite(self.dataloader) else position.get("inner_samples", 0)
        start, used_samples = divmod(done, samples)
        total = samples_per_epoch(self.dataloader)
        if total is not None and done >= total:
            start, used_samples = -(-total // samples), 0  # an incomplete last batch is counted as a full one
        epoch_length = self.epoch_length if self.counts_epochs else None
        if epoch_length is not None and can_seek(self.dataloader):  # other loaders may yield more batches
            start = min(start, epoch_length)
        if saved_samples != samples:
            iteration = (
                iteration * saved_samples // samples if epoch_length is None else epoch * epoch_length + start
            )
            warn(
                f"The checkpoint was written with {saved_samples} samples per step; this run uses {samples}. Iteration "
                f"{position['iter']} of the checkpoint corresponds to iteration {iteration} of this run"
            )
        elif start and position.get("epoch_length") not in (None, self.epoch_length):
            warn(
                f"The checkpoint was written in the middle of an epoch of {position['epoch_length']} batches, but an "
                f"epoch of this run has {self.epoch_length}, so the rest of this epoch may repeat or skip samples"
            )
        self.resume(epoch, iteration, start, position.get("validated", True))
        self._used_samples, repeated = divmod(used_samples, get_world_size())
        if used_samples and not can_start_inside_batch(self.dataloader):
            self._used_samples, repeated = 0, used_samples
        if repeated:
            warn(
                f"This run resumes in the middle of a batch, and the next step uses {repeated} samples again"
            )
        # A checkpoint may be written before the epoch is counted.
        finished = epoch + (start == self.epoch_length)
        self._runner.logger.info(f"Resumed after epoch {finished}, iteration {iteration}")

    def resume(self, epoch: int, iteration: int, start: int, validated: bool = True) -> None:
        """Continue after `iteration` steps, at batch `start` of epoch `epoch`.

        If `validated` is False, and validation is due at this point, the loop validates first.
        """
        self._epoch, self._iter, self._start = epoch, iteration, start
        self.inner_iter, self._validated, self._validation_start = start, validated, None

    def run(self) -> torch.nn.Module:
        """Train and validate; return the model."""
        runner = self._runner
        if self.stop_now:  # an earlier call stopped in the middle of an epoch
            self._start, self.stop_now = self.inner_iter, False
        runner.call_hook("before_train")
        self._set_training_mode(self._modules_in_eval_mode())
        self._report_eval_mode()
        runner.checkpoints.restore_frozen()
        with self._annotate_errors():
            self._train()
        runner.phases.switch("other")
        optim = runner.optim_wrapper
        open_ = (
            [n for n, w in optim.items() if not w.begins_window()]
            if isinstance(optim, OptimWrapperDict)
            else []
        )
        if open_ and not self.stop_now:
            runner.logger.warning(
                f"The last accumulation window of {open_} in optim_wrapper is incomplete, and its gradients have not "
                "been applied: train_step determines how often each optimizer counts, so its end is unknown"
            )
        runner.call_hook("after_train")
        return runner.model

    def _train(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        """Run a missed validation, and warn if there is nothing to train."""
        if self._progress >= self._goal:
            unit, key = ("epochs", "max_epochs") if self.counts_epochs else ("iterations", "max_iters")
            done = f"the run is already complete ({self._progress} of {self._goal} {unit})"
            self._runner.logger.warning(f"Nothing to train: {done}; increase train_cfg.{key} to continue")
        self._run_missed_validation()

    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Train on one batch and call the hooks before and after it."""
        runner, phases = self._runner, self._runner.phases
        phases.switch("hooks")
        for hook in runner.hook_methods["before_train_iter"]:
            hook(runner, batch_idx=idx, data_batch=data_batch)
        phases.switch("step")
        self.step_samples = self._sizes.get(idx, data_batch) * self._world_size
        outputs = runner.step(data_batch)
        phases.samples += self.step_samples
        phases.switch("logging")
        runner.meter.record(outputs, self._iter + 1, self.step_samples)
        self.inner_iter = idx + 1
        phases.switch("hooks")
        for hook in runner.hook_methods["after_train_iter"]:
            hook(runner, batch_idx=idx, data_batch=data_batch, outputs=outputs)
        self._iter += 1
        phases.end_step()

    def _run_missed_validation(self) -> None:
        """Validate if a validation was due but incomplete when the checkpoint was written or the run stopped."""
        if not self._validated:
            self._runner.checkpoints.restore_random_state()
            self._validate(due=True)
            # In the middle of an epoch, the loader had drawn its random numbers before the checkpoint was written. A
            # restarted loader draws them again, so restore this state after the loader has started.
            self._runner.checkpoints.random_state = get_random_state()

    def _validate(self, due: bool = False) -> None:
        if self._runner.val_loop is not None and (due or self._is_due(self._progress)):
            self._validated, self._validation_start = False, get_random_state()
            modules = self._kept_in_eval = self._modules_in_eval_mode()
            self._runner.val_loop.run()
            if not self._runner.model.training:  # a hook may have put some modules into training mode
                modules = [module for module in modules if not module.training]
            self._set_training_mode(modules)
            self.end_validation()
        self._validated = True

    def frozen(self) -> dict[str, list[str]]:
        """Return the names of frozen parameters, and of modules that the user put into evaluation mode."""
        model = unwrap_model(self._runner.model)
        kept = set(self._modules_in_eval_mode() if model.training else self._kept_in_eval)
        return {
            "parameters": [name for name, param in model.named_parameters() if not param.requires_grad],
            "modules": [name for name, module in model.named_modules() if module in kept],
        }

    def freeze(self, names: Mapping[str, Sequence[str]]) -> None:
        """Freeze the parameters and modules that `frozen` returned, and no others."""
        model = unwrap_model(self._runner.model)
        parameters, modules = (set(names[key]) for key in ("parameters", "modules"))
        for name, param in model.named_parameters():
            param.requires_grad_(name not in parameters)
        self._set_training_mode([module for name, module in model.named_modules() if name in modules])

    def _modules_in_eval_mode(self) -> list[torch.nn.Module]:
        """Return the modules that the user, not the model's `train` method, put into evaluation mode.

        If the whole model is in evaluation mode, the result is empty.
        """
        model = unwrap_model(self._runner.model)  # a wrapper is always created in training mode
        modules = model.modules() if model.training else ()
        return [module for module in modules if not module.training and module not in self._frozen_by_model]

    def _set_training_mode(self, except_modules: list[torch.nn.Module]) -> None:
        self._runner.model.train()
        self._frozen_by_model = {m for m in self._runner.model.modules() if not m.training}
        for module in except_modules:
            module.training = False

    def _report_eval_mode(self) -> None:
        """Warn about modules with trainable parameters that the user has put into evaluation mode."""
        kept = {
            module
            for module in self._modules_in_eval_mode()
            if any(param.requires_grad for param in module.parameters())
        }
        names = [name for name, module in unwrap_model(self._runner.model).named_modules() if module in kept]
        if names:
            self._runner.logger.warning(
                f"These modules have trainable parameters but stay in evaluation mode during training, without "
                f"dropout and with fixed BatchNorm statistics: {', '.join(names[:5])}{', ...' * (len(names) > 5)}. If "
                "this is not intended, call model.train() before the run (from_pretrained returns models in "
                "evaluation mode)"
            )

    def end_validation(self) -> None:
        """Mark the validation as complete. Validation loops call this method before hooks use the metrics."""
        if self._validation_start is not None:  # otherwise, a hook has called `runner.val`
            self._validated, self._validation_start = True, None

    def _numbered_batches(self) -> Iterator[tuple[int, Any]]:
        """Iterate over pairs (index, batch) for the rest of the current epoch (or pass over the data)."""
        self._runner.phases.switch("data")
        start, self._start = self._start, 0
        used_samples, self._used_samples = self._used_samples, 0
        self.in_epoch = True
        if start == 0:
            # Restore the state before the loader draws its random numbers for a new epoch.
            self._runner.checkpoints.restore_random_state()
        seeks = can_seek(self.dataloader)
        if (order := order_of(self.dataloader)) is not None:
            order.set_epoch(self._epoch, start if seeks else 0, used_samples)
        state = self.loader_state
        batches: Iterator[Any] = iter(state.record(self._load(self._epoch)))
        restored, state.restored = state.restored, False
        if start and not seeks and not restored:
            # This loader cannot seek, so load and discard the finished batches.
            next(islice(batches, start - 1, None), None)
        self._runner.checkpoints.restore_random_state()
        if self._runner.speed.prefetch and can_draw_ahead(self.dataloader) and not state.exists:
            feed = DeviceFeed(self.dataloader, self._runner.device, self._runner.speed.prefetch)
            batches = feed.move_batches(batches)
        return enumerate(until_one_ends(batches, self.dataloader, self._runner.logger.warning), start)

    def _end_pass(self) -> None:
        """Check the number of batches in the completed pass."""
        self._runner.phases.switch("hooks")
        check_complete(self.dataloader, self._name, self.inner_iter, self.epoch_length or 1)

    def _update_length(self) -> None:
        """Update the length of the epoch if a hook has changed the loader's batch size or the size of the dataset."""
        previous, self._length = self._length, length(self.dataloader)
        if self._length != previous and self._length is not None and self.epoch_length is not None:
            self.epoch_length = self._length
            if self._resumed_at is not None:
                self.resume_at(self._resumed_at)
                self._validated = True  # a missed validation has run before this epoch
            self.max_iters = self._iter - self._start + self.epoch_length * (self.max_epochs - self._epoch)
        self._resumed_at = None

    def _count_pass(self) -> None:
        self._epoch += 1
        self.in_epoch = False

    @contextmanager
    def _annotate_errors(self) -> Iterator[None]:
        """Add the step and a remedy to errors, and the step to the report printed when another rank fails."""
        report_progress(self._describe_position)
        try:
            with explain_worker_errors(self._name, self._runner.loops.loadings):
                yield
        except Exception as error:
            rank = f"on rank {get_rank()} of {get_world_size()}, " if get_world_size() > 1 else ""
            error.add_note(f"({rank}in {self._describe_position()})")
            raise
        report_progress(None)

    def _describe_position(self) -> str:
        if self._runner.model.training:
            return f"epoch {self._epoch + 1}, iteration {self._iter + 1} of training"
        return f"validation after epoch {self._epoch}, iteration {self._iter} of training"


@LOOPS.register_module()
class EpochBasedTrainLoop(_TrainLoop):
    """Train for `max_epochs` epochs. If the loader has no length, an epoch ends when the loader is exhausted.

    Args:
        runner: the Runner that owns the loop.
        dataloader: a loader or its configuration.
        max_epochs: number of epochs.
        val_begin: the first epoch after which to validate.
        val_interval: number of epochs between validation runs; validation also runs after the last epoch. With a
            fraction such as 0.5, the number of validation runs per epoch is 1 / val_interval.
        dynamic_intervals: pairs (epoch, val_interval); each interval takes effect at its epoch.
    """

    def __init__(
        self,
        runner: Runner,
        dataloader: Loadable,
        max_epochs: PositiveInt,
        val_begin: NonNegativeInt = 1,
        val_interval: PositiveIntOrFraction = 1,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        check(max_epochs, PositiveInt, "max_epochs")
        check(val_interval, PositiveIntOrFraction, "val_interval")
        interval = val_interval if isinstance(val_interval, int) else 1
        super().__init__(runner, dataloader, val_begin, interval, dynamic_intervals)
        if (runs := round(1 / val_interval)) > 1:
            if self.epoch_length is None or dynamic_intervals:
                message = "a fraction requires a loader that has a length, and no dynamic_intervals"
                raise ConfigError(message, "val_interval")
            self.validations_per_epoch = runs
        if is_infinite(self.dataloader):
            raise ConfigError(
                "an epoch with InfiniteSampler never ends; use DefaultSampler, or iteration-based training "
                "(train_cfg.by_epoch=False)",
                "dataloader.sampler",
            )
        self.max_epochs = max_epochs
        self.max_iters = INF if self.epoch_length is None else max_epochs * self.epoch_length
        if self.max_iters == 0:
            raise DataError(
                "the training loader yields no batches; reduce batch_size, or set drop_last=False"
            )

    @property
    def _progress(self) -> int:
        return self._epoch

    @property
    def _goal(self) -> int:
        return self.max_epochs

    def _train(self) -> None:
        self._begin()
        while self._epoch < self.max_epochs and not (self.stop_training or self.stop_now):
            self.run_epoch()
            if not self.stop_now:
                self._validate()

    def run_epoch(self) -> None:
        """Train on the batches of one epoch; a resumed run starts at the batch after the checkpoint."""
        runner = self._runner
        set_dataset_epoch(self.dataloader, self._epoch)
        runner.call_hook("before_train_epoch")
        self._update_length()
        self._set_training_mode(self._modules_in_eval_mode())
        for idx, data_batch in self._numbered_batches():
            self.run_iter(idx, data_batch)
            if self._is_due_within_epoch():
                self._validate(due=True)
                self.stop_now |= self.stop_training
            if self.stop_now:
                return
        self._end_pass()
        runner.call_hook("after_train_epoch")
        self._count_pass()
        self.inner_iter = 0


@LOOPS.register_module()
class IterBasedTrainLoop(_TrainLoop):
    """Train for `max_iters` steps, repeating the data as needed.

    Args:
        runner: the Runner that owns the loop.
        dataloader: a loader or its configuration.
        max_iters: number of steps.
        val_begin: the first iteration after which to validate.
        val_interval: number of iterations between validation runs; validation also runs after the last iteration.
        dynamic_intervals: pairs (iteration, val_interval); each interval takes effect at its iteration.
    """

    max_epochs = 1
    counts_epochs = False

    def __init__(
        self,
        runner: Runner,
        dataloader: Loadable,
        max_iters: PositiveInt,
        val_begin: NonNegativeInt = 1,
        val_interval: PositiveInt = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        check(max_iters, PositiveInt, "max_iters")
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self.max_iters = max_iters

    @property
    def _progress(self) -> int:
        return self._iter

    @property
    def _goal(self) -> int:
        return self.max_iters

    def _train(self) -> None:
        set_dataset_epoch(self.dataloader, self._epoch)
        self._runner.call_hook("before_train_epoch")  # the whole run counts as one epoch
        self._set_training_mode(self._modules_in_eval_mode())
        self._begin()
        batches = self._batches()
        while self._iter < self.max_iters and not (self.stop_training or self.stop_now):
            self.run_iter(*next(batches))
            self._validate()
        self._runner.phases.switch("other")
        self._runner.call_hook("after_train_epoch")

    def _batches(self) -> Iterator[tuple[int, Any]]:
        while True:
            empty = self._start == 0
            for numbered in self._numbered_batches():
                empty = False
                yield numbered
            if empty:
                raise DataError("the training loader yields no batches; check batch_size and drop_last")
            self._end_pass()
            self._count_pass()
            set_dataset_epoch(self.dataloader, self._epoch)

    def resume(self, epoch: int, iteration: int, start: int, validated: bool = True) -> None:
        """Continue after `iteration` steps, at batch `start` of pass `epoch`; see the base class."""
        infinite = is_infinite(self.dataloader)
        super().resume(0 if infinite else epoch, iteration, iteration if infinite else start, validated)


class _EvalLoop(BaseLoop):
    """Base class for the validation and test loops.

    Args:
        runner: the Runner that owns the loop.
        dataloader: a loader or its configuration, or a dict of several, which are evaluated in turn. The name of each
            loader (its index in a list of `DataLoader` objects) and a slash are then prefixed to the names of its
            metrics.
        evaluator: an `Evaluator`, or the metrics for an `Evaluator`. With several loaders, this applies to each of
            them, unless it is a dict with the same names.
        fp16: run under autocast with the device's default lower-precision dtype.
    """

    def __init__(self, runner: Runner, dataloader: Any, evaluator: Any, fp16: bool = False) -> None:
        self._runner = runner
        loaders = _by_name(dataloader)
        # The name of the loader that is being built or evaluated.
        self._current: str | None = None
        # The loaders, and their evaluators, by name; a single loader has the name ''.
        self.dataloaders: dict[str, DataLoader[Any]] = {}
        self.evaluators: dict[str, Evaluator] = {}
        for name, part in _evaluators(evaluator, list(loaders)).items():
            self._current = name
            self.dataloader = self._build(loaders[name])
            if isinstance(part, Mapping) and part.get("type") in EVALUATOR.module_dict:
                part = EVALUATOR.build(part)
            self.evaluator = part if isinstance(part, Evaluator) else Evaluator(part)
            if (meta := getattr(self.dataloader.dataset, "metainfo", None)) is not None:
                self.evaluator.dataset_meta = meta
        self._current = None
        self._separate_files()
        self._autocast = torch.autocast(runner.device.type) if fp16 else nullcontext()
        # Number of batches in this rank's last evaluation.
        self.batches = 0
        self.phase: Phase = "test" if self.mode == "test" else "validation"

    def _separate_files(self) -> None:
        """Add the name of the loader to an output file that the metrics of several loaders share."""
        metrics = [(name, m) for name, part in self.evaluators.items() for m in getattr(part, "metrics", ())]
        paths = [getattr(metric, "out_file_path", None) for _, metric in metrics]
        for (name, metric), path in zip(metrics, paths, strict=True):
            if path is not None and paths.count(path) > 1:
                own = Path(path).with_stem(f"{Path(path).stem}_{name.replace('/', '_')}")
                metric.out_file_path = type(path)(own)

    @property
    def _name(self) -> str:
        return f"{self.mode}_dataloader.{self._current or ''}".rstrip(".")

    @property
    def _key(self) -> str:
        return next(iter(self.dataloaders)) if self._current is None else self._current

    @property
    def dataloader(self) -> Any:
        """The loader that is being evaluated; between evaluations, the first one."""
        return self.dataloaders[self._key]

    @dataloader.setter
    def dataloader(self, loader: DataLoader[Any]) -> None:
        self.dataloaders[self._key] = loader

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of `dataloader`."""
        return self.evaluators[self._key]

    @evaluator.setter
    def evaluator(self, evaluator: Evaluator) -> None:
        self.evaluators[self._key] = evaluator

    def run(self) -> dict[str, float]:
        """Evaluate and return the metrics."""
        optim = self._runner.optim_wrapper
        evaluating = nullcontext() if optim is None else optim.evaluating()
        with self._runner.phases.during(self.phase), torch.no_grad(), evaluating:
            return self._run()

    def _run(self) -> dict[str, float]:
        runner, mode, names = self._runner, self.mode, list(self.dataloaders)
        metrics: dict[str, float] = {}
        self.batches, self._current = 0, None
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        if runner.is_training:
            average_batchnorm(runner.model)
        runner.model.eval()
        for self._current in names:
            with explain_worker_errors(self._name, runner.loops.loadings):
                self._run_batches()
            values = self.evaluator.evaluate(dataset_size(self.dataloader))
            prefix = f"{self._current}/" if self._current else ""
            metrics |= {prefix + name: value for name, value in values.items()}
        self._current = None
        if mode == "val" and runner.is_training and isinstance(runner.train_loop, _TrainLoop):
            runner.train_loop.end_validation()
        runner.call_hook(f"after_{mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{mode}")
        return metrics

    def _predict(self, batch: Any, index: int) -> dict[str, Any]:
        """Return the arguments of the evaluator for a batch: the predictions and the losses, as far as required."""
        interface = self._runner.interface
        by_loss = getattr(self.evaluator, "loss_metrics", ())
        if not by_loss:
            return {"data_samples": interface.predict(batch, self.mode)}
        size = BatchSizes(self.dataloader).get(index, batch)
        if len(by_loss) == len(self.evaluator.metrics):
            losses = interface.evaluate_losses(batch), size
            return {"data_samples": losses, "losses": losses}
        predictions, values = interface.predict_with_losses(batch, self.mode)
        return {"data_samples": predictions, "losses": (values, size)}

    def _run_batches(self) -> None:
        runner, mode = self._runner, self.mode
        before, after = (runner.hooks_at(f"{when}_{mode}_iter") for when in ("before", "after"))
        self.evaluator.reset()
        done = 0
        for idx, (data_batch, is_real) in enumerate(self._batches()):
            for hook in before if is_real else ():
                hook(runner, batch_idx=idx, data_batch=data_batch)
            with self._autocast:
                outputs = self._predict(data_batch, idx)
            if not is_real:
                continue
            done = idx + 1
            self.evaluator.process(data_batch=data_batch, **outputs)
            for hook in after:
                hook(runner, batch_idx=idx, data_batch=data_batch, outputs=outputs["data_samples"])
        self.batches += done
        check_complete(self.dataloader, self._name, done, length(self.dataloader))

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Iterate over pairs (batch, is_real); `is_real` is False for batches that only keep the ranks synchronized."""
        if (order := order_of(self.dataloader)) is not None and order.is_padded:
            order.draw_without_repeats()
        if getattr(self._runner.model, "forward_needs_all_ranks", False):
            return until_all_end(self._load(), self.dataloader)
        return ((batch, True) for batch in self._load())


def _by_name(loaders: Any) -> dict[str, Any]:
    """Return the loaders in a dict of loaders; the name of a single loader, or of its configuration, is ''."""
    is_list = isinstance(loaders, list | tuple) and len(loaders) > 0
    if is_list and all(isinstance(part, DataLoader) for part in loaders):
        loaders = dict(enumerate(loaders))
    options = {"dataloader", *inspect.signature(DataLoader).parameters}
    parts = list(loaders.values()) if isinstance(loaders, Mapping) and not options & loaders.keys() else []
    several = any(isinstance(part, Mapping) and "dataset" in part for part in parts)
    if several or (parts and all(hasattr(part, "__iter__") and not isinstance(part, str) for part in parts)):
        return {str(name): loader for name, loader in loaders.items()}
    return {"": loaders}


def _evaluators(evaluator: Any, names: list[str]) -> dict[str, Any]:
    """Return the evaluator, or its metrics, for each loader."""
    if names == [""] or not isinstance(evaluator, Mapping) or "type" in evaluator:
        copies = [evaluator, *(copy.deepcopy(evaluator) for _ in names[1:])]  # each loader has its own state
        return dict(zip(names, copies, strict=True))
    parts = {str(name): part for name, part in evaluator.items()}
    if parts.keys() != set(names):
        message = f"must have the names of the loaders, {names}, as keys, not {sorted(parts)}"
        raise ConfigError(f"{message}; or set the metrics that apply to each loader", "evaluator")
    return {name: parts[name] for name in names}


@LOOPS.register_module()
class ValLoop(_EvalLoop):
    """Validation loop."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(_EvalLoop):
    """Test loop."""

    mode = "test"


_ARGUMENTS = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}
# The Runner's arguments that limit the number of batches.
_LIMITS = ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run")


class LazyLoops:
    """The loops that are defined by a Runner's arguments.

    Args:
        runner: the Runner that owns the loops.
        arguments: the Runner's arguments.

    Raises:
        ConfigError: only some of a loop's three arguments are set, or the configuration of a loop is invalid.
    """

    def __init__(self, runner: Runner, arguments: Mapping[str, Any]) -> None:
        self._runner = runner
        self._loops: dict[str, Any] = {mode: _loop_options(mode, arguments) for mode in _ARGUMENTS}

    def require(self, mode: str) -> None:
        """Check that the arguments define the loop for `mode`.

        Raises:
            ConfigError: the arguments do not define the loop.
        """
        if self._loops[mode] is None:
            *others, last = _ARGUMENTS[mode]
            call = "training" if mode == "train" else f"{mode}()"
            raise ConfigError(f"{call} requires {', '.join(others)} and {last}", "Runner")

    def get(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if the arguments do not define the loop. The first call builds it."""
        loop = self._loops[mode]
        if isinstance(loop, dict):
            try:
                loop = self._loops[mode] = LOOPS.build(loop, default_args={"runner": self._runner})
            except ConfigError as error:
                _add_path(error, mode)
                raise
        return loop

    def get_if_built(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if it is not defined or has not been built."""
        loop = self._loops[mode]
        return None if isinstance(loop, dict) else loop

    @property
    def by_epoch(self) -> bool:
        """Whether training is epoch-based; True if there is no training loop."""
        loop = self._loops["train"]
        kind = loop["type"] if isinstance(loop, Mapping) else type(loop)
        return getattr(kind, "counts_epochs", True)

    def count(self, name: str, default: int) -> int:
        """Return a counter of the training loop, such as `iter`; `default` if the loop has not been built."""
        loop = self.get_if_built("train")
        return default if loop is None else getattr(loop, name)

    def loadings(self) -> list[Loading]:
        """Return the current passes over the loaders."""
        loadings = (getattr(loop, "loading", None) for loop in self._loops.values())
        return [loading for loading in loadings if isinstance(loading, Loading)]

    def end_workers(self) -> None:
        """Stop the worker processes of all loaders."""
        for loop in self._loops.values():
            if isinstance(loop, BaseLoop):
                loop.end_loading()


def _loop_options(mode: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the loop for `mode`, or None if `arguments` do not define this loop."""
    loader, cfg_name, third = _ARGUMENTS[mode]
    missing = [name for name in _ARGUMENTS[mode] if arguments[name] is None]
    if len(missing) == 3:
        return None
    if missing:
        hint = "" if mode == "train" else f"; {cfg_name}=dict() and {third}='loss' are the shortest values"
        raise ConfigError(
            f"{', '.join(_ARGUMENTS[mode])} must be set together, but {' and '.join(missing)} is missing{hint}"
        )
    if not isinstance(arguments[cfg_name], Mapping):
        raise ConfigError(f"must be a dict, not {short_repr(arguments[cfg_name])}", cfg_name)
    options = {**arguments[cfg_name], "dataloader": arguments[loader]}
    if mode == "train":
        return _train_options(options)
    return {"type": ValLoop if mode == "val" else TestLoop, "evaluator": arguments[third], **options}


def _train_options(options: dict[str, Any]) -> dict[str, Any]:
    if "type" in options:
        if "by_epoch" in options:
            raise ConfigError("'type' and 'by_epoch' are mutually exclusive; remove one of them", "train_cfg")
        if isinstance(options["type"], str):
            with add_config_path({}, "train_cfg"):
                options["type"] = LOOPS.resolve(options["type"])
        return options
    if "by_epoch" not in options:
        raise ConfigError(
            "requires by_epoch=True (with max_epochs) or by_epoch=False (with max_iters)", "train_cfg"
        )
    by_epoch = options.pop("by_epoch")
    check(by_epoch, bool, "train_cfg.by_epoch")
    return {"type": EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop, **options}


def _add_path(error: ConfigError, mode: str) -> None:
    """Prefix `error.path` with the name of the Runner argument that the loop option belongs to."""
    loader, cfg_name, third = _ARGUMENTS[mode]
    head = re.split(r"[.\[]", error.path)[0]
    if head in _LIMITS:
        return
    # The Evaluator calls the argument `evaluator` `metrics`.
    paths = {"dataloader": loader, "evaluator": third, "metrics": third, "": cfg_name}
    paths |= {loader: loader, cfg_name: cfg_name}
    error.path = paths[head] + error.path[len(head) :] if head in paths else f"{cfg_name}.{error.path}"
