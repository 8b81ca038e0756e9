"""The Runner, which owns the objects of a run and executes training, validation and testing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.config import Config, add_config_path, options
from slipstream.devices import default_device
from slipstream.dist import get_rank, get_world_size, is_distributed, is_main_process
from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks import Hook, HookList, NotebookHook, ProgressBarHook, in_notebook
from slipstream.hooks.ema import validation_weights
from slipstream.logging import PhaseTimes
from slipstream.model import unwrap_model
from slipstream.model.copies import copy_model
from slipstream.optim import OptimWrapper
from slipstream.optim.scheduler import INF
from slipstream.redaction import redact
from slipstream.registry import RUNNERS
from slipstream.runner import builders, resume
from slipstream.runner.checkpoints import Checkpoints
from slipstream.runner.environment import EnvOptions, Randomness, set_random_seed, setup_env
from slipstream.runner.folder_lock import FolderLock
from slipstream.runner.interface import LossArgument, ModelInterface, build_interface
from slipstream.runner.logs import log_start, open_logs, show_config, write_config
from slipstream.runner.loops import LazyLoops
from slipstream.runner.resume import STRIP_WRAPPER
from slipstream.runner.run_context import RunContext
from slipstream.runner.user_config import (
    AutoScaleLr,
    check_arguments,
    read_limits,
    unknown_key_warnings,
    with_defaults,
)
from slipstream.speed import CFG_OPTIONS, SpeedPlan
from slipstream.speed.apply import plan_optim, prepare_optim
from slipstream.step import Step

if TYPE_CHECKING:
    from slipstream.runner.user_config import LoaderArgument, OptimArgument


@RUNNERS.register_module()
class Runner:
    """Train, validate and test a model.

    The arguments up to `cfg` are those of MMEngine's Runner. The arguments after `cfg` are not part of MMEngine.

    Components are passed as objects or as configurations (dicts with a `type`). The constructor builds the model, moves
    it to the device and wraps it. The data loaders, optimizer and schedulers are built on first use.

    Args:
        model: a `BaseModel`, any `nn.Module` if `loss_fn` is set, or a model configuration.
        work_dir: output folder; created if it does not exist.
        train_dataloader, train_cfg, optim_wrapper: required for training; set all three or none.
        val_dataloader, val_cfg, val_evaluator: required for validation; set all three or none. `val_dataloader` may be
            a dict of several loaders; their names are prefixed to the names of the metrics. `val_evaluator` is
            `'loss'`, a metric, or a list of them.
        test_dataloader, test_cfg, test_evaluator: required for testing; like those for validation.
        auto_scale_lr: `dict(enable=True, base_batch_size=...)` multiplies every learning rate by
            batch size x processes / base_batch_size. As in MMEngine, accumulation steps are not counted.
        param_scheduler: one or more schedulers.
        default_hooks: hooks that replace the default hooks of the same name; None removes a hook.
        custom_hooks: additional hooks.
        data_preprocessor: data preprocessor for a model that is built from a configuration or used with `loss_fn`.
        load_from: a checkpoint to load weights from.
        resume: True resumes from the latest checkpoint in work_dir. If there is none, it resumes from `load_from`, or
            only loads its weights if the file contains no training position. A path resumes from that checkpoint.
        launcher: `none`, `pytorch`, `slurm` or `mpi`.
        env_cfg, randomness: the fields of `EnvOptions` and `Randomness`.
        log_processor, log_level, visualizer: options for logging and visualization.
        default_scope: the registry scope to search first.
        experiment_name: the run's name in logs.
        cfg: the complete configuration. The keys in `slipstream.speed.CFG_OPTIONS` are read only from this argument.
        speed: `'auto'`, or a dict of `SpeedPlan`'s fields; the default is `cfg['speed']`.
        loss_fn: for a plain `nn.Module`, a function `loss_fn(outputs, targets)` (as in `accelerate`), the
            configuration of such a function, or `'model'` if the model returns the loss.
        limit_train_batches: maximum number of batches per training epoch; a float is a fraction of the loader.
        limit_val_batches: maximum number of batches per validation or test run.
        overfit_batches: train on only this many batches, the same ones in every epoch.
        fast_dev_run: run this many steps, validate on the same number of batches, and save no checkpoints; True means
            1.
        revise_keys: (pattern, replacement) pairs that rename the weights in `load_from`, as in `re.sub`. Default:
            remove the prefixes of DDP and `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        work_dir: str | Path,
        train_dataloader: LoaderArgument = None,
        val_dataloader: LoaderArgument = None,
        test_dataloader: LoaderArgument = None,
        train_cfg: Mapping[str, Any] | None = None,
        val_cfg: Mapping[str, Any] | None = None,
        test_cfg: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        optim_wrapper: OptimArgument = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Sequence[Hook | Mapping[str, Any]] | None = None,
        data_preprocessor: Any = None,
        load_from: str | Path | None = None,
        resume: bool | str | Path = False,
        launcher: str = "none",
        env_cfg: Mapping[str, Any] | None = None,
        log_processor: Any = None,
        log_level: str = "INFO",
        visualizer: Any = None,
        default_scope: str = "slipstream",
        randomness: Mapping[str, Any] | None = None,
        experiment_name: str | None = None,
        cfg: Any = None,
        speed: str | SpeedPlan | Mapping[str, Any] | None = None,
        loss_fn: LossArgument = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        overfit_batches: float | None = None,
        fast_dev_run: bool | int = False,
        revise_keys: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.limits, arguments = read_limits(arguments)
        self.cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg or {}))
        # Errors in the constructor report the path of the invalid value in this configuration.
        self._user_cfg = {**self.cfg, **{k: v for k, v in arguments.items() if k != "cfg" and v is not None}}
        self.optim_wrapper: OptimWrapper | None = None
        self.param_schedulers: list[Any] | dict[str, list[Any]] | None = None
        self.step: Step
        self.is_training = self._compiled = False
        self.phases = PhaseTimes()
        # The error that ended the last run, or None if there was no error.
        self.error: BaseException | None = None
        self._context = RunContext(self, self._user_cfg, default_scope)
        with self._context.constructing():
            self._init_parts(arguments)

    def _init_parts(self, arguments: dict[str, Any]) -> None:
        scale_lr = check_arguments(arguments)
        self.loops = LazyLoops(self, arguments)
        self._training = {k: arguments[k] for k in ("optim_wrapper", "param_scheduler")}
        self._training["auto_scale_lr"] = scale_lr
        plan = builders.read_plan(arguments, self.cfg)
        self._randomness = options(Randomness, arguments["randomness"], "randomness")
        setup_env(arguments["launcher"], options(EnvOptions, arguments["env_cfg"], "env_cfg"))
        self.work_dir = str(Path(arguments["work_dir"]).expanduser().absolute())
        load_from = arguments["load_from"]
        source, seed, problems = resume.find_resume(arguments["resume"], load_from, self.work_dir)
        self._set_seed(seed)
        self._open_logs(
            *(arguments[k] for k in ("experiment_name", "log_level", "log_processor", "visualizer"))
        )
        if arguments["resume"] is True and source is None:
            self.logger.info(f"No checkpoint found in {self.work_dir}; starting a new run")
        for line in problems:
            self.logger.warning(line)
        self.folder_lock = FolderLock(self.work_dir, self.logger.warning)
        self.checkpoints = Checkpoints(self, load_from, source, arguments["revise_keys"])
        self.device = default_device()
        preprocessor, loss_fn, optim = (
            arguments[k] for k in ("data_preprocessor", "loss_fn", "optim_wrapper")
        )
        model = builders.build_model(arguments["model"], preprocessor, loss_fn)
        self.speed, self.model = builders.prepare(
            model, optim, plan, self._randomness.deterministic, self.device, self.logger
        )
        self._interface = build_interface(self.model, loss_fn, preprocessor, self.device)
        self._training["optim_wrapper"] = plan_optim(optim, self.speed, self.device)
        self._hooks = HookList()
        self.hook_methods = self._hooks.methods
        defaults = with_defaults(arguments["default_hooks"], self.by_epoch, arguments["custom_hooks"])
        for name, default in defaults.items():
            with add_config_path(self._user_cfg, f"default_hooks.{name}"):
                self._hooks.register(default)
        for hook in builders.plan_hooks(self.speed):
            self._hooks.register(hook)
        if is_main_process() and (in_notebook() or self.logger.console.is_terminal):
            self._hooks.register(NotebookHook() if in_notebook() else ProgressBarHook())
        self.register_custom_hooks(arguments["custom_hooks"] or ())
        show_config(self.cfg, self.seed, self.visualizer, self.logger)
        for line in unknown_key_warnings(self.cfg, [*arguments, *CFG_OPTIONS, *self.speed.sources]):
            self.logger.warning(line)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """Build a Runner from a configuration, or its file, whose keys are the constructor's arguments.

        Other keys (variables in the file, `compile`, `model_wrapper_cfg`) remain in `runner.cfg`.

        Raises:
            ConfigError: the configuration has no `model` or `work_dir`, or a value is invalid.
        """
        if isinstance(cfg, str | Path):
            cfg = Config.fromfile(cfg)
        cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg))
        for required in ("model", "work_dir"):
            if required not in cfg:
                hint = did_you_mean(required, cfg)
                raise ConfigError(f"the configuration has no '{required}', which is required{hint}")
        names = [name for name in inspect.signature(cls).parameters if name != "cfg"]
        return cls(**{name: cfg[name] for name in names if name in cfg}, cfg=cfg)

    # ---- loops, progress and configuration -----------------------------------------------------------

    @property
    def interface(self) -> ModelInterface:
        """The interface for calling `model`, which a hook may have replaced."""
        self._interface.model = self.model
        return self._interface

    @property
    def train_loop(self) -> Any:
        """The training loop."""
        return self.loops.get("train")

    @property
    def val_loop(self) -> Any:
        """The validation loop, or None if the arguments do not define it."""
        return self.loops.get("val")

    @property
    def test_loop(self) -> Any:
        """The test loop, or None if the arguments do not define it."""
        return self.loops.get("test")

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
        return self.loops.by_epoch

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.loops.count("epoch", 0)

    @property
    def iter(self) -> int:
        """Number of completed training steps."""
        return self.loops.count("iter", 0)

    @property
    def inner_iter(self) -> int:
        """Number of completed steps in the current epoch."""
        return self.loops.count("inner_iter", 0)

    @property
    def max_epochs(self) -> int:
        """Total number of epochs; 1 if training is iteration-based."""
        return self.loops.count("max_epochs", 1)

    @property
    def max_iters(self) -> int:
        """Total number of training steps; a very large number if the total is unknown (see `knows_length`)."""
        return self.loops.count("max_iters", 1)

    @property
    def knows_length(self) -> bool:
        """Whether the total number of training steps is known; False for epochs over a loader without a length."""
        return self.max_iters < INF

    @property
    def samples_per_step(self) -> int:
        """Number of samples per training step, summed over all processes."""
        return self.train_loop.samples_per_step

    @property
    def user_config(self) -> dict[str, Any]:
        """The arguments and the configuration of this Runner, without secrets; values may be objects."""
        return redact(dict(self._user_cfg))

    @property
    def model_name(self) -> str:
        """The class name of the model."""
        kinds = type(unwrap_model(self.model)).__mro__
        # For a sharded model, torch creates a class that derives from FSDPModule and the user's class.
        return next(kind.__name__ for kind in kinds if not hasattr(kind, "unshard"))

    @property
    def distributed(self) -> bool:
        """Whether a process group is initialized."""
        return is_distributed()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return get_world_size()

    # ---- training, validation, test ---------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Initialize the weights that were not loaded, train the model, and return it.

        Raises:
            ConfigError: an earlier call ended in the middle of an epoch, or a hook of this Runner calls this method.
        """
        self.loops.require("train")
        with self._context.training():
            self.folder_lock.lock(Path(self.work_dir), "work_dir")
            self._build_training()
            self.call_hook("before_run")
            self.checkpoints.initialize()
            self.load_or_resume()
            assert self.optim_wrapper is not None
            self.checkpoints.restore_counts()
            self.step = builders.make_step(
                self.interface, self.model, self.optim_wrapper, self.speed, self.logger, self.phases
            )
            # A run that cannot start does not replace the configuration of an earlier run.
            write_config(self.cfg, self.seed, self.work_dir, self.timestamp, self.logger)
            self._compiled = self.is_training = True
            self.optim_wrapper.switch_mode(training=True)
            try:
                self.train_loop.run()
            finally:
                self.optim_wrapper.switch_mode(training=False)
            with self.phases.during("checkpoint"):
                self.checkpoints.wait()
            self.read_logs()
            self.call_hook("after_run")
        return self.model

    def val(self) -> dict[str, float]:
        """Validate the model and return the metrics. The Runner's random state does not change.

        When called from a hook, this method does not call `before_run` and `after_run`.
        """
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test the model and return the metrics; see `val`."""
        return self._evaluate("test")

    def averaged_model(self) -> nn.Module:
        """Return a copy of the unwrapped model with the weights that are validated: the average if the run has one.

        `model` contains the weights that further training continues from.
        """
        with validation_weights(self) as model:
            return copy_model(model).eval()

    def _evaluate(self, mode: str) -> dict[str, float]:
        self.loops.require(mode)
        with self._context.evaluating() as outermost:
            loop = self.loops.get(mode)
            if outermost:
                self.call_hook("before_run")
            self.load_or_resume()
            self._compile()
            metrics: dict[str, float] = loop.run()
            if outermost:
                self.call_hook("after_run")
        return metrics

    def _build_training(self) -> None:
        loop = self.loops.get("train")
        if self.optim_wrapper is None:
            with add_config_path(self._user_cfg, "optim_wrapper"):
                self.optim_wrapper = builders.build_optim(self.model, self._training["optim_wrapper"])
            prepare_optim(self.optim_wrapper, self.model, self.speed, self.device)
            self.scale_lr(self.optim_wrapper, self._training["auto_scale_lr"])
            schedulers, lr_scaled = self._training["param_scheduler"], self._training["auto_scale_lr"].enable
            self.param_schedulers = builders.build_schedulers(schedulers, self.optim_wrapper, loop, lr_scaled)
        self.loops.get("val")  # builds the validation loop

    def scale_lr(
        self, optim_wrapper: OptimWrapper, auto_scale_lr: AutoScaleLr | Mapping[str, Any] | None
    ) -> None:
        """Scale every learning rate by `samples_per_step / base_batch_size`, if enabled."""
        scale = options(AutoScaleLr, auto_scale_lr, "auto_scale_lr")
        if scale.enable and scale.base_batch_size is not None:
            base = scale.base_batch_size
            self.logger.info(builders.scale_lr(optim_wrapper, base, self.train_dataloader))

    def _compile(self) -> None:
        if self.speed.compile is not None and not self._compiled:
            from slipstream.speed.compiled_modules import compile_model  # most runs do not compile

            compile_model(unwrap_model(self.model), self.speed.compile, self.logger.warning)
        self._compiled = True

    # ---- checkpoints ---------------------------------------------------------------------------------

    def load_or_resume(self) -> None:
        """Resume from the checkpoint found at construction, or load `load_from`. Later calls have no effect.

        If no optimizer has been built, as in a run that only validates or tests, this loads only the weights.
        """
        self.checkpoints.load_or_resume()

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: str | torch.device = "cpu",
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = STRIP_WRAPPER,
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint into the model and return the checkpoint."""
        return self.checkpoints.load(filename, map_location, strict, revise_keys)

    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: str | torch.device = "cpu",
    ) -> None:
        """Restore a checkpoint; training continues at the next step.

        If called before `train`, this method builds the optimizer, the schedulers and the loops, and calls
        `before_run`. As with the `resume` argument, the run then uses the checkpoint's seed.

        Raises:
            CheckpointError: an entry of the checkpoint is missing, invalid, or belongs to a different run. The message
                names the entry. The run is unchanged unless the message states otherwise.
        """
        self.loops.require("train")
        with self._context.running() as outermost:
            checkpoint, seed = self.checkpoints.read_to_resume(filename, map_location)
            if seed is not None:
                self._set_seed(seed)
            self._build_training()
            if outermost:
                self.call_hook("before_run")
            self.checkpoints.restore(checkpoint, filename, resume_optimizer, resume_param_scheduler)

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
            save_optimizer, save_param_scheduler: whether to save the state of the optimizer and of the schedulers.
            meta: additional entries of the checkpoint's `meta`.
            by_epoch: True if called from `after_train_epoch`, False if called from `after_train_iter`, None if the
                counters already include the current epoch and step.
            mark_last: make this the checkpoint that `resume=True` loads.
            consolidate: gather a sharded model on rank 0 and write one file instead of a folder.
            background: write in a thread while training continues; the run ends only after the file is written. This
                has no effect if `consolidate` is True and the model is sharded.
            on_saved: called on rank 0 when the checkpoint is complete; with `background`, in the background thread.

        Raises:
            CheckpointError: this checkpoint, or the previous background checkpoint, could not be written.
        """
        with self.phases.during("checkpoint"), validation_weights(self, average=False):
            self.read_logs()  # raises an error for a non-finite loss before earlier checkpoints are replaced
            checkpoint = self.checkpoints.state(by_epoch, save_optimizer, save_param_scheduler)
            checkpoint["meta"].update(meta or {})
            self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
            finished = self.iter + (by_epoch is False)
            resume.check_weights(unwrap_model(self.model), checkpoint, finished)
            target = Path(out_dir) / filename
            self.checkpoints.write(checkpoint, target, mark_last, consolidate, background, on_saved)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written; see `save_checkpoint(background=True)`.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self.checkpoints.wait()

    def _set_seed(self, resumed: int | None) -> None:
        configured = self._randomness.seed
        seed = configured if resumed is None else resumed
        self.seed = set_random_seed(seed, self._randomness.deterministic, self._randomness.diff_rank_seed)

    # ---- hooks ---------------------------------------------------------------------------------------

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a hook. Hooks with the same priority run in the order of registration."""
        self._hooks.register(hook, priority)

    def register_custom_hooks(self, hooks: Sequence[Hook | Mapping[str, Any]]) -> None:
        """Add multiple hooks."""
        for index, hook in enumerate(hooks):
            with add_config_path(self._user_cfg, f"custom_hooks[{index}]"):
                self.register_hook(hook)

    @property
    def hooks(self) -> list[Hook]:
        """The registered hooks in execution order."""
        return list(self._hooks)

    def hooks_at(self, stage: str) -> list[Callable[..., None]]:
        """Return the methods of all hooks that implement `stage`, in execution order."""
        return self.hook_methods[stage]

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the method `fn_name`, usually one of `Hook.stages`, of every hook that defines it."""
        for method in self.hook_methods[fn_name]:
            method(self, **kwargs)

    # ---- logs ----------------------------------------------------------------------------------------

    def read_logs(self) -> None:
        """Read the losses recorded since the last call, and write them and the learning rates to the message hub.

        This is the only method in which a training run synchronizes with the device to read values.

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

    def _open_logs(self, name: str | None, log_level: int | str, processor: Any, visualizer: Any) -> None:
        file = self.cfg.filename
        title = name or (Path(file).stem if file else None)
        logs = open_logs(Path(self.work_dir), title, self.by_epoch, log_level, processor, visualizer)
        self.timestamp, self.experiment_name = logs.timestamp, logs.experiment
        self.log_dir, self.json_log = str(logs.log_dir), f"{logs.timestamp}.json"
        self.logger, self.message_hub, self.meter = logs.logger, logs.hub, logs.meter
        self.log_processor, self.visualizer = logs.processor, logs.visualizer
        log_start(self.logger, self.seed, self.work_dir)
