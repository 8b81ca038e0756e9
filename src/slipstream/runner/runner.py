"""The Runner, which owns the objects of a run and executes training, validation and testing."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slipstream.checkpoint import (
    BackgroundWriter,
    get_random_state,
    load_weights,
    mark_last_checkpoint,
    restoring,
    set_random_state,
    weights_in,
    write_checkpoint,
)
from slipstream.config import Config, options
from slipstream.devices import default_device
from slipstream.dist import all_gather_object, get_rank, get_world_size, is_distributed, is_main_process
from slipstream.dist.sharding import mesh_of
from slipstream.errors import CheckpointError, ConfigError, NonFiniteLossError, did_you_mean
from slipstream.hooks import (
    GcHook,
    Hook,
    HookList,
    LossSpikeHook,
    NanGuardHook,
    NotebookHook,
    PreemptionHook,
    ProgressBarHook,
    ReportHook,
    in_notebook,
)
from slipstream.logging import PhaseTimes
from slipstream.model import unwrap_model
from slipstream.model.sync_batchnorm import average_batchnorm
from slipstream.optim import OptimWrapper
from slipstream.preemption import Preempted
from slipstream.redaction import Redactor, redact, redact_errors
from slipstream.registry import LOOPS, RUNNERS, default_scope
from slipstream.runner import builders, planning, resume, resume_check
from slipstream.runner.environment import (
    EnvOptions,
    Randomness,
    collect_env,
    set_random_seed,
    setup_env,
)
from slipstream.runner.folder_lock import FolderLock
from slipstream.runner.logs import config_text, name_run, open_logs, write_config
from slipstream.runner.loops import BaseLoop
from slipstream.runner.rollback import Rollback
from slipstream.runner.user_config import (
    TRIPLES,
    AutoScaleLr,
    add_config_path,
    add_loop_path,
    check_arguments,
    loop_options,
    unread_keys,
    with_defaults,
)
from slipstream.speed import CFG_OPTIONS, compile_model
from slipstream.speed.apply import add_parts, compiling, fuse_optim, plan_optim, prepare_model, switches
from slipstream.step import Step
from slipstream.step.graph import GraphStep
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.config_types import (
        AnyMapping,
        AutoScaleLrCfg,
        DataLoaderCfg,
        DefaultHooksCfg,
        EnvCfg,
        EpochTrainCfg,
        EvalCfg,
        IterTrainCfg,
        LimitedLoaderCfg,
        LoopTrainCfg,
        OptimWrapperCfg,
        RandomnessCfg,
        SpeedCfg,
        TrainableModel,
    )

__all__ = ["Runner"]


@RUNNERS.register_module()
class Runner:
    """Train, validate and test a model. The arguments are those of MMEngine's Runner plus `speed`.

    Components are passed as objects or as configurations (dicts with a `type`). The constructor builds the model, moves
    it to the device and wraps it. The data loaders, optimizer and schedulers are built on first use.

    Args:
        model: a `BaseModel` or its configuration.
        work_dir: output folder; created if it does not exist.
        train_dataloader, train_cfg, optim_wrapper: required for training; set all three or none.
        val_dataloader, val_cfg, val_evaluator: required for validation; set all three or none.
        test_dataloader, test_cfg, test_evaluator: required for testing; set all three or none.
        auto_scale_lr: `dict(enable=True, base_batch_size=...)` scales every learning rate by
            batch size x processes / base_batch_size (without gradient accumulation, as in MMEngine).
        param_scheduler: one scheduler or several.
        default_hooks: hooks that replace the default hooks of the same name; None removes a hook.
        custom_hooks: additional hooks.
        data_preprocessor: data preprocessor for a model that is built from a configuration.
        load_from: a checkpoint to load weights from.
        resume: True resumes from the latest checkpoint in work_dir (or from `load_from`); a path resumes from
            that checkpoint.
        launcher: `none`, `pytorch`, `slurm` or `mpi`.
        env_cfg, randomness: options of `EnvOptions` and `Randomness`.
        log_processor, log_level, visualizer: options for logging and visualization.
        default_scope: the registry scope to search first.
        experiment_name: the run's name in logs.
        cfg: the complete configuration. The keys in `slipstream.speed.CFG_OPTIONS` are read only from this argument.
        speed: speed options, `'auto'` or a dict of `SpeedPlan`'s fields; by default `cfg['speed']`.
    """

    def __init__(
        self,
        model: TrainableModel | Mapping[str, Any],
        work_dir: str | Path,
        train_dataloader: DataLoader[Any] | DataLoaderCfg | LimitedLoaderCfg | AnyMapping | None = None,
        val_dataloader: DataLoader[Any] | DataLoaderCfg | LimitedLoaderCfg | AnyMapping | None = None,
        test_dataloader: DataLoader[Any] | DataLoaderCfg | LimitedLoaderCfg | AnyMapping | None = None,
        train_cfg: EpochTrainCfg | IterTrainCfg | LoopTrainCfg | AnyMapping | None = None,
        val_cfg: EvalCfg | AnyMapping | None = None,
        test_cfg: EvalCfg | AnyMapping | None = None,
        auto_scale_lr: AutoScaleLrCfg | AnyMapping | None = None,
        optim_wrapper: (
            OptimWrapper | Optimizer | OptimWrapperCfg | Mapping[str, OptimWrapper] | AnyMapping | None
        ) = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: DefaultHooksCfg | AnyMapping | None = None,
        custom_hooks: Sequence[Hook | Mapping[str, Any]] | None = None,
        data_preprocessor: Any = None,
        load_from: str | Path | None = None,
        resume: bool | str | Path = False,
        launcher: str = "none",
        env_cfg: EnvCfg | AnyMapping | None = None,
        log_processor: Any = None,
        log_level: str = "INFO",
        visualizer: Any = None,
        default_scope: str = "slipstream",
        randomness: RandomnessCfg | AnyMapping | None = None,
        experiment_name: str | None = None,
        cfg: Any = None,
        speed: Literal["auto"] | SpeedCfg | AnyMapping | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg or {}))
        # Build errors report their path in this configuration.
        self._user_cfg = {**self.cfg, **{k: v for k, v in arguments.items() if k != "cfg" and v is not None}}
        self._scope = default_scope
        self._redactor = Redactor(self._user_cfg)
        self.optim_wrapper: OptimWrapper | None = None
        self.param_schedulers: list[Any] | dict[str, list[Any]] | None = None
        self.step: Step
        self.resumed_random_state: dict[str, Any] | None = None
        self.is_training = self.resuming = self._loaded = self._compiled = self._preempted = False
        self.resumed_from: Path | None = None
        self.phases = PhaseTimes()
        self.error: BaseException | None = None
        """The error that ended the last run, or None."""
        self._resumed_counts: dict[str, int] = {}
        with self._build_context():
            self._init_parts(arguments)
        # Each Runner keeps its own random state, so several Runners in one process do not affect each other.
        self._random_state = get_random_state()

    def _init_parts(self, arguments: dict[str, Any]) -> None:
        scale_lr = check_arguments(arguments)
        self._loops: dict[str, Any] = {mode: loop_options(mode, arguments) for mode in TRIPLES}
        self._training = {k: arguments[k] for k in ("optim_wrapper", "param_scheduler")}
        self._training["auto_scale_lr"] = scale_lr
        plan = planning.read_plan(arguments, self.cfg)
        self._randomness = options(Randomness, arguments["randomness"], "randomness")
        setup_env(arguments["launcher"], options(EnvOptions, arguments["env_cfg"], "env_cfg"))
        self.work_dir = str(Path(arguments["work_dir"]).expanduser().absolute())
        self._resume_from, seed, problems = resume.find_resume(
            arguments["resume"], arguments["load_from"], self.work_dir
        )
        self._load_from = arguments["load_from"]
        self._set_seed(seed)
        self._open_logs(arguments)
        for line in problems:
            self.logger.warning(line)
        self.folder_lock = FolderLock(self.logger.warning)
        self._writer = BackgroundWriter()
        self.rollback = Rollback(self)
        self.device = default_device()
        model = builders.build_model(arguments["model"], arguments["data_preprocessor"])
        self.capabilities = planning.capabilities_of(
            model, arguments["optim_wrapper"], self._randomness.deterministic
        )
        self.speed = planning.complete_plan(plan, self.capabilities, self.logger.info)
        with switches(self.speed, self.device, self.logger.warning):
            self.model: nn.Module = prepare_model(model, self.speed, self.device)
        self._training["optim_wrapper"] = plan_optim(arguments["optim_wrapper"], self.speed, self.device)
        self._hooks = HookList()
        for hook in [
            *with_defaults(arguments["default_hooks"], self.by_epoch),
            *planning.plan_hooks(self.speed),
        ]:
            self._hooks.register(hook)
        if is_main_process() and in_notebook():
            self._hooks.register(NotebookHook())
        elif is_main_process() and self.logger.console.is_terminal:
            self._hooks.register(ProgressBarHook())
        self.register_custom_hooks(arguments["custom_hooks"] or ())
        write_config(self.cfg, self.visualizer, self.logger, self.work_dir, self.timestamp)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """Build a Runner from a configuration whose keys are the constructor's arguments.

        Other keys (variables in the file, `compile`, `model_wrapper_cfg`) remain in `runner.cfg`.

        Raises:
            ConfigError: the configuration has no `model` or `work_dir`, or a value is invalid.
        """
        cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg))
        for required in ("model", "work_dir"):
            if required not in cfg:
                hint = did_you_mean(required, cfg)
                raise ConfigError(f"the configuration has no '{required}', which is required{hint}")
        names = [name for name in inspect.signature(cls).parameters if name != "cfg"]
        runner = cls(**{name: cfg[name] for name in names if name in cfg}, cfg=cfg)
        for line in unread_keys(cfg, [*names, *CFG_OPTIONS]):
            runner.logger.warning(line)
        return runner

    # ---- training, validation, test ---------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Train and return the model."""
        if self._loops["train"] is None:
            raise ConfigError("training requires train_dataloader, train_cfg and optim_wrapper", "Runner")
        with self._run_context():
            if self._preempted:
                raise ConfigError(
                    "this Runner was stopped by a signal; build a new one with resume=True", "Runner"
                )
            self.folder_lock.lock(Path(self.work_dir), "work_dir")
            self._build_training()
            self.call_hook("before_run")
            if not self._loaded:
                resume.init_weights(unwrap_model(self.model))
            self.load_or_resume()
            assert self.optim_wrapper is not None
            self.restore_counts()
            self.step = planning.make_step(
                self.model, self.optim_wrapper, self.speed, self.logger.warning, self.logger.info
            )
            self._compiled = self.is_training = True
            try:
                self.train_loop.run()
            except Preempted:
                self._preempted = True
                raise
            finally:
                if isinstance(self.step, GraphStep):
                    self.step.pause()
            with self.phases.during("checkpoint"):
                self._writer.wait()
            self.read_logs()
            self.call_hook("after_run")
        return self.model

    def val(self) -> dict[str, float]:
        """Validate and return the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test and return the metrics."""
        return self._evaluate("test")

    def _evaluate(self, mode: str) -> dict[str, float]:
        if self._loops[mode] is None:
            raise ConfigError(
                f"{mode}() requires {mode}_dataloader, {mode}_cfg and {mode}_evaluator", "Runner"
            )
        with self._run_context():
            loop = self._loop(mode)
            self.call_hook("before_run")
            self.load_or_resume()
            self._compile()
            metrics: dict[str, float] = loop.run()
            self.call_hook("after_run")
        return metrics

    def _build_training(self) -> None:
        loop = self._loop("train")
        if self.optim_wrapper is None:
            with add_config_path(self._user_cfg, "optim_wrapper"):
                self.optim_wrapper = builders.build_optim(self.model, self._training["optim_wrapper"])
            self.optim_wrapper.phases = self.phases
            fuse_optim(self.optim_wrapper, self.speed)
            add_parts(self.speed, self.model, self.optim_wrapper)
            self.scale_lr(self.optim_wrapper, self._training["auto_scale_lr"])
            schedulers = self._training["param_scheduler"]
            self.param_schedulers = builders.build_schedulers(schedulers, self.optim_wrapper, loop)
        if self._loops["val"] is not None:
            self._loop("val")

    def scale_lr(
        self, optim_wrapper: OptimWrapper, auto_scale_lr: AutoScaleLr | Mapping[str, Any] | None
    ) -> None:
        """Scale every learning rate by samples per step / `base_batch_size`, if enabled."""
        scale = options(AutoScaleLr, auto_scale_lr, "auto_scale_lr")
        if scale.enable and scale.base_batch_size is not None:
            self.logger.info(builders.scale_lr(optim_wrapper, scale.base_batch_size, self.samples_per_step))

    def _compile(self) -> None:
        if self.speed.compile is not None and not self._compiled:
            compile_model(unwrap_model(self.model), self.speed.compile, self.logger.warning)
        self._compiled = True

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        """Activate the run's logger, hub and options; close log files and hooks on exit, even after an error."""
        set_random_state(self._random_state)
        self.error = None
        if any(isinstance(hook, ReportHook) for hook in self._hooks):  # otherwise nothing reads the times
            self.phases.start()
        try:
            with (
                self._build_context(),
                self.logger.as_current(),
                self.message_hub.as_current(),
                switches(self.speed, self.device, self.logger.warning),
                compiling(self.speed, self.model, self.logger),
            ):
                yield
        except BaseException as error:
            self.error = error
            if isinstance(error, Exception):
                # DEBUG records are written only to the log file; the caller reports the error on the console.
                self.logger.debug(f"{type(error).__name__}: {error}", exc_info=True)
            raise
        finally:
            self._random_state = get_random_state()
            self.is_training = False
            self.phases.stop()
            self._close()

    def _close(self) -> None:
        """Release everything that a run holds, even if one of the calls fails."""
        with ExitStack() as stack:  # calls the functions in reverse order
            stack.callback(self.logger.close)
            stack.callback(self.visualizer.flush)
            stack.callback(self.folder_lock.release)
            stack.callback(self._close_writer)
            stack.callback(self._end_workers)
            for hook in self._hooks:
                if isinstance(hook, ProgressBarHook | GcHook | LossSpikeHook | NanGuardHook | PreemptionHook):
                    stack.callback(hook.close)
                elif isinstance(hook, ReportHook):
                    stack.callback(hook.write, self)

    def _close_writer(self) -> None:
        self._wait_for_writer()  # raises nothing that would replace the error of the run
        self._writer.close()

    def _wait_for_writer(self) -> None:
        try:
            self._writer.wait()
        except CheckpointError as error:
            self.logger.error(f"{error}. Training does not stop, because the next checkpoint may be written")

    @contextmanager
    def _build_context(self) -> Iterator[None]:
        """Search the run's registry scope first, add config paths to errors, and remove secrets from them."""
        with (
            redact_errors(self._redactor),
            add_config_path(self._user_cfg),
            default_scope(self._scope),
        ):
            yield

    # ---- checkpoints ---------------------------------------------------------------------------------

    def load_or_resume(self) -> None:
        """Resume from the checkpoint found at construction, or load `load_from`. Later calls have no effect.

        A run without training loads only the weights.
        """
        if self._resume_from is not None and self.optim_wrapper is not None:
            self.resume(self._resume_from)
            self._resume_from = None
        elif not self._loaded and (source := self._resume_from or self._load_from):
            # Training can start from a subset of the weights; evaluation requires all of them.
            self.load_checkpoint(source, strict=self.optim_wrapper is None)
        self._loaded = True

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: str | torch.device = "cpu",
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint into the model and return the checkpoint."""
        checkpoint = resume.read_checkpoint(unwrap_model(self.model), filename, map_location, revise_keys)
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        self._load_weights(checkpoint, strict, filename)
        return checkpoint

    def _load_weights(self, checkpoint: Mapping[str, Any], strict: bool, filename: str | Path) -> None:
        state = weights_in(checkpoint, filename)
        with restoring("state_dict", filename):
            for line in load_weights(unwrap_model(self.model), state, strict, str(filename)):
                self.logger.warning(f"Loading {filename}: {line}")
        self.logger.info(f"Loaded {filename}")

    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: str | torch.device = "cpu",
    ) -> None:
        """Resume training at the step after the checkpoint.

        Raises:
            CheckpointError: an entry of the checkpoint is missing, invalid, or belongs to a different run. The message
                names its key. Nothing is changed in the run, unless the message says so.
        """
        keys = ((r"^module\.", ""),)
        checkpoint = resume.read_checkpoint(unwrap_model(self.model), filename, map_location, keys)
        resume_check.check_content(checkpoint, filename)
        self.resumed_from = Path(filename).absolute()
        self.resuming = True
        try:
            self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
            optim = self.optim_wrapper if resume_optimizer else None
            schedulers = self.param_schedulers if resume_param_scheduler else None
            resume_check.check_matches(
                checkpoint, filename, self.model, optim, schedulers, self.logger.warning
            )
            if "ema_state_dict" in checkpoint:  # an EMAHook removes this key
                self.logger.warning(
                    "The checkpoint contains averaged weights, but the Runner has no EMAHook: training continues from "
                    "the averaged weights"
                )
            self._load_weights(checkpoint, True, filename)
            self._restore(checkpoint, filename, optim, schedulers)
        finally:
            self.resuming = False
        self.rollback.load()
        self.rollback.add(self.iter, Path(filename).absolute())

    def _restore(
        self, checkpoint: Mapping[str, Any], filename: str | Path, optim: OptimWrapper | None, schedulers: Any
    ) -> None:
        """Restore everything except the weights."""
        if checkpoint.get("message_hub"):
            with restoring("message_hub", filename):
                self.message_hub.load_state_dict(checkpoint["message_hub"])
        if optim is not None:
            with restoring("optimizer", filename):
                resume.restore_optimizer(self.model, optim, checkpoint)
            # A single wrapper normally counts iterations, whose number changes with the batch size.
            counts, iteration = checkpoint.get("batches", {}), checkpoint["meta"]["iter"]
            self._resumed_counts = {name: n for name, n in counts.items() if name or n != iteration}
        if schedulers:
            with restoring("param_schedulers", filename):
                resume.restore_schedulers(schedulers, checkpoint)
        with restoring("meta", filename):
            self.train_loop.resume_at(checkpoint["meta"])
        states = checkpoint["meta"].get("random_state")
        if states and len(states) == get_world_size():
            self.resumed_random_state = states[get_rank()]

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool | None = True,
        mark_last: bool = False,
        consolidate: bool = False,
        background: bool = False,
        on_saved: Callable[[], None] | None = None,
    ) -> None:
        """Write the run state to `out_dir/filename`. All ranks must call this method.

        A sharded model is saved as a folder (`epoch_3.sharded` for `epoch_3.pth`) to which each rank writes its shards.

        Args:
            out_dir, filename: path of the checkpoint.
            save_optimizer, save_param_scheduler: whether to save their state.
            meta: additional entries of the checkpoint's `meta`.
            by_epoch: True if called from `after_train_epoch`, False if called from `after_train_iter`, None if the
                counters already include the current epoch and step.
            mark_last: make this the checkpoint that `resume=True` loads.
            consolidate: gather a sharded model on rank 0 and write one file instead of a folder.
            background: write in a thread while training continues; the run ends only after the write. Without effect
                if `consolidate` is True and the model is sharded.
            on_saved: called on rank 0 when the checkpoint is complete; with `background`, in the thread.

        Raises:
            CheckpointError: this checkpoint, or the previous one in the background, could not be written.
        """
        with self.phases.during("checkpoint"):
            self.read_logs()  # raises an error if a loss is not finite, before earlier checkpoints are replaced
            checkpoint = self._state(by_epoch, save_optimizer, save_param_scheduler)
            checkpoint["meta"].update(meta or {})
            self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
            self._write(checkpoint, Path(out_dir) / filename, mark_last, consolidate, background, on_saved)

    def _write(
        self,
        checkpoint: dict[str, Any],
        target: Path,
        mark_last: bool,
        consolidate: bool,
        background: bool,
        on_saved: Callable[[], None] | None,
    ) -> None:
        """Write a checkpoint; see `save_checkpoint` for the arguments."""

        def finish(path: Path) -> None:
            if mark_last:
                self.rollback.add(checkpoint["meta"]["iter"], path)
            if mark_last and is_main_process():
                mark_last_checkpoint(self.work_dir, path)
            if on_saved is not None and is_main_process():
                on_saved()

        warn = self.logger.warning
        if background and not (consolidate and mesh_of(self.model) is not None):
            self._writer.write(checkpoint, target, warn, finish)
        else:
            self._wait_for_writer()  # keep the order of checkpoints
            finish(write_checkpoint(checkpoint, target, warn, consolidate))

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written; see `save_checkpoint(background=True)`.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def _state(
        self, by_epoch: bool | None, save_optimizer: bool, save_param_scheduler: bool
    ) -> dict[str, Any]:
        """Return the run's state in MMEngine's checkpoint layout; see `save_checkpoint` for the arguments."""
        self._check_weights(self.iter + (by_epoch is False))
        if self.is_training:
            average_batchnorm(self.model)
        hub = self.message_hub.state_dict()
        state: dict[str, Any] = {
            "meta": self._meta(by_epoch),
            "state_dict": unwrap_model(self.model).state_dict(),
            "message_hub": {**hub, "runtime_info": self._redactor.tree(hub["runtime_info"])},
        }
        if save_optimizer and self.optim_wrapper is not None:
            state |= resume.optimizer_state(self.model, self.optim_wrapper)
        if save_param_scheduler and self.param_schedulers is not None:
            state["param_schedulers"] = resume.scheduler_states(self.param_schedulers)
        return state

    def _check_weights(self, iteration: int) -> None:
        error = None
        try:
            resume.check_weights(unwrap_model(self.model), iteration)
        except NonFiniteLossError as found:
            error = found
        if NonFiniteLossError in self.rollback.faults:
            error = self.rollback.agree(error)
        if error is not None:
            raise error

    def _meta(self, by_epoch: bool | None) -> dict[str, Any]:
        dataset = getattr(self.train_dataloader, "dataset", None) if self.is_training else None
        return {
            **self.train_loop.position(by_epoch),
            "seed": self.seed,
            "random_state": all_gather_object(get_random_state()),
            "experiment_name": self.experiment_name,
            "time": time.strftime("%Y%m%d_%H%M%S"),
            "slipstream_version": __version__,
            "cfg": self.cfg_text,
            "dataset_meta": getattr(dataset, "metainfo", None),
        }

    def restore_counts(self) -> None:
        """Set the number of batches that the optimizer wrappers have counted, after a resume."""
        assert self.optim_wrapper is not None
        self.optim_wrapper.initialize_count_status(self.model, self.iter, self.max_iters)
        resume.restore_counts(self.model, self.optim_wrapper, self._resumed_counts)

    def restore_random_state(self) -> None:
        """Restore the random state of the resumed checkpoint just before the first step. Later calls have no effect."""
        if self.resumed_random_state is not None:
            set_random_state(self.resumed_random_state)
            self.resumed_random_state = None

    def _set_seed(self, resumed: int | None) -> None:
        configured = self._randomness.seed
        seed = configured if resumed is None else resumed
        self.seed = set_random_seed(seed, self._randomness.deterministic, self._randomness.diff_rank_seed)
        self._replaced_seed = configured if configured is not None and configured != self.seed else None

    # ---- hooks ---------------------------------------------------------------------------------------

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a hook. Hooks with the same priority run in the order of registration."""
        self._hooks.register(hook, priority)

    def register_custom_hooks(self, hooks: Sequence[Hook | Mapping[str, Any]]) -> None:
        """Add several hooks."""
        for index, hook in enumerate(hooks):
            with add_config_path(self._user_cfg, f"custom_hooks[{index}]"):
                self.register_hook(hook)

    @property
    def hooks(self) -> list[Hook]:
        """The registered hooks in execution order."""
        return list(self._hooks)

    def hooks_at(self, stage: str) -> list[Callable[..., None]]:
        """Return the methods of all hooks that implement `stage`, in execution order."""
        return self._hooks.at(stage)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the method `fn_name`, usually one of `Hook.stages`, of every hook that defines it."""
        for method in self._hooks.at(fn_name):
            method(self, **kwargs)

    # ---- logs ----------------------------------------------------------------------------------------

    def read_logs(self) -> None:
        """Write the losses recorded since the last call, and the learning rates, to the message hub.

        This is the only method in which a training run synchronizes with the device to read values. With
        `nan_guard='rollback'` or a `LossSpikeHook`, all ranks must call it.

        Raises:
            NonFiniteLossError: a loss was NaN or infinite.
        """
        with self.phases.during("logging"):
            self.meter.flush()
            if self.optim_wrapper is not None:
                for name, values in self.optim_wrapper.get_lr().items():
                    self.message_hub.update_scalar(f"train/{name}", values[0])
            self.call_hook("read_logs")
        if self.is_training:
            self.message_hub.update_info_dict({"epoch": self.epoch, "iter": self.iter})

    def _open_logs(self, arguments: dict[str, Any]) -> None:
        file = self.cfg.filename
        name = name_run(
            Path(self.work_dir), arguments["experiment_name"] or (Path(file).stem if file else None)
        )
        logs = open_logs(
            name,
            arguments["log_level"],
            self.by_epoch,
            arguments["log_processor"],
            arguments["visualizer"],
            self._redactor,
        )
        self.timestamp, self.experiment_name = name.timestamp, name.experiment
        self.log_dir = str(name.log_dir)
        self.json_log = f"{name.timestamp}.json"
        self.logger, self.message_hub, self.meter = logs.logger, logs.hub, logs.meter
        self.log_processor, self.visualizer = logs.processor, logs.visualizer
        self.logger.info("Environment: " + ", ".join(f"{k} {v}" for k, v in collect_env().items()))
        self.logger.info(f"Seed: {self.seed}; work_dir: {self.work_dir}")
        if self._replaced_seed is not None:
            self.logger.warning(
                f"The seed {self.seed} of the resumed run replaces the configured seed {self._replaced_seed}"
            )
        if arguments["resume"] is True and self._resume_from is None:
            self.logger.info(f"No checkpoint found in {self.work_dir}; starting a new run")

    # ---- state: loops are built on first access -------------------------------------------------------

    def _loop(self, mode: str) -> Any:
        """Return the loop of `mode`; the first call builds it."""
        loop = self._loops[mode]
        if isinstance(loop, Mapping):
            try:
                loop = self._loops[mode] = LOOPS.build(loop, default_args={"runner": self})
            except ConfigError as error:
                add_loop_path(error, mode)
                raise
        return loop

    def _end_workers(self) -> None:
        for loop in self._loops.values():
            if isinstance(loop, BaseLoop):
                loop.end_loading()

    @property
    def train_loop(self) -> Any:
        """The training loop."""
        return self._loop("train")

    @property
    def val_loop(self) -> Any:
        """The validation loop, or None."""
        return self._loop("val")

    @property
    def test_loop(self) -> Any:
        """The test loop, or None."""
        return self._loop("test")

    @property
    def train_dataloader(self) -> Any:
        """The training loader."""
        return self.train_loop.dataloader

    @property
    def val_dataloader(self) -> Any:
        """The validation loader."""
        return self.val_loop.dataloader

    @property
    def test_dataloader(self) -> Any:
        """The test loader."""
        return self.test_loop.dataloader

    @property
    def by_epoch(self) -> bool:
        """Whether training is epoch-based; True if there is no training loop."""
        loop = self._loops["train"]
        kind = loop["type"] if isinstance(loop, Mapping) else type(loop)
        counts: bool = getattr(kind, "counts_epochs", True)
        return counts

    @property
    def _position(self) -> Any:
        """The training loop, or None if it has not been built."""
        loop = self._loops["train"]
        return None if isinstance(loop, Mapping) else loop

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._position.epoch if self._position else 0

    @property
    def iter(self) -> int:
        """Number of finished training steps."""
        return self._position.iter if self._position else 0

    @property
    def inner_iter(self) -> int:
        """Number of finished steps of the current epoch."""
        return self._position.inner_iter if self._position else 0

    @property
    def max_epochs(self) -> int:
        """Total number of epochs; 1 if training is iteration-based."""
        return self._position.max_epochs if self._position else 1

    @property
    def max_iters(self) -> int:
        """Total number of training steps."""
        return self._position.max_iters if self._position else 1

    @property
    def samples_per_step(self) -> int:
        """Number of samples per training step, summed over all processes."""
        samples: int = self.train_loop.samples_per_step
        return samples

    @property
    def all_param_schedulers(self) -> list[Any]:
        """The schedulers of all optimizers."""
        schedulers = self.param_schedulers or []
        return (
            [s for part in schedulers.values() for s in part] if isinstance(schedulers, dict) else schedulers
        )

    @property
    def cfg_text(self) -> str:
        """The configuration as YAML text."""
        return config_text(self.cfg)

    @property
    def user_config(self) -> dict[str, Any]:
        """The arguments and the configuration of this Runner, without secrets; values may be objects."""
        config: dict[str, Any] = redact(dict(self._user_cfg))
        return config

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        kinds = type(unwrap_model(self.model)).__mro__
        # For a sharded model, torch creates a class that derives from FSDPModule and the user's class.
        return next(kind.__name__ for kind in kinds if not hasattr(kind, "unshard"))

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return is_distributed()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return get_world_size()
