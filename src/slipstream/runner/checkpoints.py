"""Save a run's state in checkpoints, and load weights or resume from a checkpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint import (
    BackgroundWriter,
    check_restorable,
    load_weights,
    loaded_names,
    mark_last_checkpoint,
    restoring,
    set_random_state,
    step_average,
    write_checkpoint,
)
from slipstream.config import config_text
from slipstream.dist import all_gather_object, get_rank, get_world_size
from slipstream.errors import CheckpointError
from slipstream.hooks import CheckpointHook, PreemptionHook
from slipstream.hooks.ema import validation_weights
from slipstream.model import unwrap_model
from slipstream.model.sync_batchnorm import average_batchnorm
from slipstream.model.weight_init import skip_pretrained
from slipstream.optim import OptimWrapper
from slipstream.runner import resume
from slipstream.sharding import mesh_of

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner


class Checkpoints:
    """Saves, loads and restores the state of a run. The Runner's methods document the arguments.

    Args:
        runner: the Runner whose state is saved and restored.
        load_from: the checkpoint from which to load weights, or None.
        resume_from: the checkpoint from which to resume, or None.
        revise_keys: renames the weights in `load_from`; see `revise`.
    """

    def __init__(
        self,
        runner: Runner,
        load_from: str | Path | None,
        resume_from: Path | None,
        revise_keys: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        self._runner = runner
        self._load_from, self._revise_keys = load_from, revise_keys or resume.STRIP_WRAPPER
        # The checkpoint from which `load_or_resume` resumes training; None if there is none, or after a resume.
        self.resume_from = resume_from
        # Identifies the checkpoints of this run. A resumed run has the ID of the run that it continues.
        self.run_id = secrets.token_hex(8)
        # The log folder with the curves. A resumed run has that of the run that it continues.
        self._log_folder = Path(runner.log_dir).name
        self._writer = BackgroundWriter()
        self._counts: tuple[Mapping[str, Mapping[str, int]], int] = {}, 0
        self._loaded = self._initialized = False
        self._loaded_names: set[str] = set()  # names of the tensors that were loaded before initialization
        # Whether the run is being resumed from a checkpoint, in which case hooks restore their state from it.
        self.resuming = False
        # The checkpoint from which the run was resumed, or None.
        self.resumed_from: Path | None = None
        # The `meta` entry of this checkpoint.
        self.resumed_meta: Mapping[str, Any] = {}
        self._frozen: Mapping[str, Any] | None = None
        self._frozen_at_start: Any = None
        # The random state to restore just before the next step.
        self.random_state: dict[str, Any] | None = None

    # ---- load and resume -------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Initialize the weights, except those that have been loaded. Later calls have no effect.

        Random numbers are drawn for all weights, including those that have been loaded, so the random state after this
        call does not depend on whether weights have been loaded.

        Raises:
            ModelError: a hook saves checkpoints, and a part of the model's state cannot be saved or loaded.
        """
        if self._initialized:
            return
        core = unwrap_model(self._runner.model)
        state_dict = core.state_dict() if self._loaded_names else {}
        loaded = {name: state_dict[name].clone() for name in self._loaded_names & state_dict.keys()}
        if self.resume_from is not None or self.resumed_from is not None:
            skip_pretrained(core)
        resume.init_weights(core, self._runner.interface.initializes_weights)
        if loaded:
            core.load_state_dict(loaded, strict=False)
        if any(isinstance(hook, CheckpointHook | PreemptionHook) for hook in self._runner.hooks):
            check_restorable(core.state_dict())
        self._initialized = True

    def load_or_resume(self) -> None:
        """Resume from the checkpoint found at construction, or load `load_from`. Later calls have no effect."""
        runner = self._runner
        if self.resume_from is not None and runner.optim_wrapper is not None:
            runner.resume(self.resume_from)
        elif not self._loaded and (source := self.resume_from or self._load_from):
            # Training can start from a subset of the weights; evaluation requires all of them.
            keys = self._revise_keys if source is self._load_from else resume.STRIP_WRAPPER
            runner.load_checkpoint(source, strict=runner.optim_wrapper is None, revise_keys=keys)

    def load(
        self,
        source: str | Path,
        map_location: str | torch.device,
        strict: bool,
        revise_keys: Sequence[tuple[str, str]],
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint into the model and return the checkpoint."""
        checkpoint = self._read(source, map_location, revise_keys)
        self._runner.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        self._load_weights(checkpoint, strict, source)
        return checkpoint

    def read_to_resume(
        self, source: str | Path, map_location: str | torch.device
    ) -> tuple[dict[str, Any], int | None]:
        """Return a checkpoint for `restore`, and the seed of the run that saved it.

        The seed is None if the Runner keeps its own seed.
        """
        runner = self._runner
        checkpoint = self._read(source, map_location, resume.STRIP_WRAPPER)
        resume.check_content(checkpoint, source)
        seed: int | None = checkpoint["meta"].get("seed")
        if seed in (None, runner.seed) or runner.loops.get_if_built("train") is not None:
            return checkpoint, None
        runner.logger.warning(f"Using seed {seed} from the resumed run instead of seed {runner.seed}")
        return checkpoint, seed

    def restore(
        self,
        checkpoint: dict[str, Any],
        source: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
    ) -> None:
        """Restore a checkpoint read from `source`; training continues at the next step."""
        runner, warn = self._runner, self._runner.logger.warning
        self.resumed_from = Path(source).absolute()
        self.resuming = True
        try:
            runner.call_hook("after_load_checkpoint", checkpoint=checkpoint)
            optim = runner.optim_wrapper if resume_optimizer else None
            schedulers = runner.param_schedulers if resume_param_scheduler else None
            fixed_rates = not any(hook.sets_learning_rate for hook in runner.hooks)
            resume.check_matches(checkpoint, source, runner.model, optim, schedulers, warn, fixed_rates)
            resume.check_stream(checkpoint["meta"], runner.train_loop, source)
            with restoring("meta.sampler_generators", source):
                resume.restore_samplers(runner.train_loop, checkpoint["meta"])
            if "ema_state_dict" in checkpoint:  # an EMAHook removes this key
                warn(
                    "The checkpoint contains averaged weights, but this run computes no average (speed=dict(ema=...)), "
                    "so training continues from the averaged weights"
                )
            self._load_weights(checkpoint, True, source)
            self._restore_parts(checkpoint, source, optim, schedulers)
        finally:
            self.resuming = False
        self.resume_from = None
        self.resumed_meta = checkpoint["meta"]
        self._frozen, self._frozen_at_start = map(self.resumed_meta.get, ("frozen", "frozen_at_start"))
        self.run_id = checkpoint["meta"].get("run_id", self.run_id)
        self._continue_curves(self.resumed_meta.get("log_folder", ""), self.resumed_meta.get("saved_at"))

    def _continue_curves(self, log_folder: str, saved_at: float | None) -> None:
        """Let the visualizer continue the curves of the run that saved the checkpoint, if it had the same work_dir."""
        runner, earlier = self._runner, Path(self._runner.work_dir, log_folder)
        if saved_at is not None and Path(log_folder).name == log_folder and earlier.is_dir():
            self._log_folder = log_folder
            if hasattr(runner.visualizer, "continue_run"):
                runner.visualizer.continue_run(Path(runner.log_dir), earlier, saved_at)

    def _read(
        self, source: str | Path, map_location: str | torch.device, revise_keys: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        return resume.read_checkpoint(unwrap_model(self._runner.model), source, map_location, revise_keys)

    def _load_weights(self, checkpoint: Mapping[str, Any], strict: bool, source: str | Path) -> None:
        logger, state = self._runner.logger, checkpoint["state_dict"]
        core = unwrap_model(self._runner.model)
        with restoring("state_dict", source), validation_weights(self._runner, average=False):
            for line in load_weights(core, state, strict, str(source)):
                logger.warning(f"Loading {source}: {line}")
        self._loaded = True
        if not self._initialized:
            self._loaded_names |= loaded_names(core, state)
        logger.info(f"Loaded {source}{' (average of the weights)' if step_average(checkpoint) else ''}")

    def _restore_parts(
        self, checkpoint: Mapping[str, Any], source: str | Path, optim: OptimWrapper | None, schedulers: Any
    ) -> None:
        """Restore everything except the weights."""
        runner, warn = self._runner, self._runner.logger.warning
        if checkpoint.get("message_hub"):
            with restoring("message_hub", source):
                runner.message_hub.load_state_dict(checkpoint["message_hub"])
        if optim is not None:
            with restoring("optimizer", source):
                resume.restore_optimizer(runner.model, optim, checkpoint)
            counts = {key: checkpoint.get(key, {}) for key in ("batches", "unfinished", "windows")}
            self._counts = counts, checkpoint["meta"]["iter"]
        if schedulers:
            with restoring("param_schedulers", source):
                resume.restore_schedulers(schedulers, checkpoint)
            resume.warn_of_length(checkpoint, schedulers, runner.train_loop, warn)
        with restoring("meta", source):
            runner.train_loop.resume_at(checkpoint["meta"])
        states = checkpoint["meta"].get("random_state")
        if states and len(states) == get_world_size():
            self.random_state = states[get_rank()]

    def restore_counts(self) -> None:
        """Initialize the number of batches that each optimizer wrapper has counted; after a resume, restore it."""
        runner = self._runner
        assert runner.optim_wrapper is not None
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters)
        resume.restore_counts(runner.optim_wrapper, *self._counts)

    def restore_frozen(self) -> None:
        """Freeze the parameters and modules that were frozen when the resumed checkpoint was saved.

        A hook that freezes or unfreezes them in an earlier epoch does not run again. If the run does not start with the
        same frozen parameters and modules as the run that saved the checkpoint, the user has changed them on purpose.
        """
        loop, saved, self._frozen = self._runner.train_loop, self._frozen, None
        start, self._frozen_at_start = self._frozen_at_start, loop.frozen()
        if saved is not None and start == self._frozen_at_start:
            loop.freeze(saved)
        elif saved is not None:
            self._runner.logger.warning(
                "The run that saved the checkpoint started with other frozen parameters, or with other modules in "
                "evaluation mode. The resumed run freezes those that its model and hooks specify"
            )

    def restore_random_state(self) -> None:
        """Restore `random_state` and set it to None. If it is already None, do nothing."""
        if self.random_state is not None:
            set_random_state(self.random_state)
            self.random_state = None

    # ---- save ------------------------------------------------------------------------------------------

    def state(
        self, by_epoch: bool | None, save_optimizer: bool, save_param_scheduler: bool
    ) -> dict[str, Any]:
        """Return the run's state in MMEngine's checkpoint layout."""
        runner = self._runner
        if runner.is_training:
            average_batchnorm(runner.model)
        state: dict[str, Any] = {
            "meta": self._meta(by_epoch),
            "state_dict": unwrap_model(runner.model).state_dict(),
            "message_hub": runner.message_hub.state_dict(runner.logger.warning),
        }
        if save_optimizer and runner.optim_wrapper is not None:
            state |= resume.optimizer_state(runner.model, runner.optim_wrapper)
        if save_param_scheduler and runner.param_schedulers is not None:
            state["param_schedulers"] = resume.scheduler_states(runner.param_schedulers)
        return state

    def _meta(self, by_epoch: bool | None) -> dict[str, Any]:
        from slipstream.version import __version__  # reads the metadata of the installed package

        runner = self._runner
        loader = runner.train_dataloader if runner.is_training else None
        loop = runner.train_loop
        position = loop.position(by_epoch)
        states = all_gather_object((loop.random_state, resume.sampler_states(loop, loader, position)))
        return {
            **position,
            "frozen": loop.frozen(),
            "frozen_at_start": self._frozen_at_start,
            "num_workers": getattr(loader, "num_workers", 0),
            "seed": runner.seed,
            "run_id": self.run_id,
            "log_folder": self._log_folder,
            "saved_at": time.time(),
            "random_state": [random_state for random_state, _ in states],
            "sampler_generators": [generators for _, generators in states],
            "experiment_name": runner.experiment_name,
            "time": time.strftime("%Y%m%d_%H%M%S"),
            "slipstream_version": __version__,
            "cfg": config_text(runner.cfg),
            "dataset_meta": getattr(getattr(loader, "dataset", None), "metainfo", None),
        }

    def write(
        self,
        checkpoint: dict[str, Any],
        target: Path,
        mark_last: bool,
        consolidate: bool,
        background: bool,
        on_saved: Callable[[], None] | None,
    ) -> None:
        """Write a checkpoint that was returned by `state`."""
        runner = self._runner

        def on_complete(path: Path) -> None:
            if mark_last:
                mark_last_checkpoint(runner.work_dir, path, self.run_id)
            if on_saved is not None:
                on_saved()

        warn = runner.logger.warning
        if background and not (consolidate and mesh_of(runner.model) is not None):
            self._writer.write(checkpoint, target, warn, on_complete)
        else:
            self._wait_or_log()  # checkpoints must be written in order
            write_checkpoint(checkpoint, target, warn, consolidate, on_saved=on_complete)

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._writer.wait()

    def _wait_or_log(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            self._runner.logger.error(
                f"{error}. Training continues; the next checkpoint will be saved as scheduled"
            )

    def close(self) -> None:
        """Wait until the last checkpoint is written. A failure is only logged, so that it cannot mask an error."""
        self._wait_or_log()
        self._writer.close()
