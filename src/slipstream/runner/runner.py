"""Who drives: the Runner owns the parts of a run and takes it from start to end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.checkpoint import (
    get_random_state,
    mark_last_checkpoint,
    set_random_state,
    write_checkpoint,
)
from slipstream.config import Config, options
from slipstream.dist import is_main_process
from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks import GcHook, Hook, HookList, NanGuardHook, ProgressBarHook
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapper
from slipstream.registry import RUNNERS, default_scope
from slipstream.runner import builders, planning, resume
from slipstream.runner.environment import (
    EnvOptions,
    Randomness,
    collect_env,
    default_device,
    set_random_seed,
    setup_env,
)
from slipstream.runner.logs import name_run, open_logs, write_config
from slipstream.runner.run_state import RunState
from slipstream.runner.user_config import TRIPLES, loop_options, placing, unread_keys, with_defaults
from slipstream.speed import CFG_OPTIONS, compile_model
from slipstream.speed.apply import add_parts, compiling, fuse_optim, plan_optim, prepare_model, switches
from slipstream.step import Step
from slipstream.step.graph import GraphStep

__all__ = ["Runner"]


@RUNNERS.register_module()
class Runner(RunState):
    """Train, validate and test a model, by MMEngine's words.

    Objects may stand wherever a configuration (a dict with a `type`) may. The model is built, moved to the
    device and wrapped at once; loaders, optimizer and schedulers when they are first needed.

    Args:
        model: a `BaseModel`, or its configuration.
        work_dir: where everything is written; made if absent.
        train_dataloader, train_cfg, optim_wrapper: what training needs; all or none.
        val_dataloader, val_cfg, val_evaluator: what validation needs; all or none.
        test_dataloader, test_cfg, test_evaluator: what a test needs; all or none.
        auto_scale_lr: `dict(enable=True, base_batch_size=...)` scales every learning rate by
            batch size x processes / base_batch_size (accumulation is not counted, as in MMEngine).
        param_scheduler: one schedule or several.
        default_hooks: replaces the hooks of the same name; None removes one.
        custom_hooks: further hooks.
        data_preprocessor: of a model that is built here from its configuration.
        load_from: a checkpoint whose weights are loaded first.
        resume: True goes on from the latest checkpoint in work_dir (or from `load_from`); a path from that.
        launcher: `none`, `pytorch`, `slurm` or `mpi`.
        env_cfg, randomness: `EnvOptions` and `Randomness`.
        log_processor, log_level, visualizer: how the run is shown.
        default_scope: whose names are looked up first.
        experiment_name: names the run in logs.
        cfg: the whole configuration; the keys in `slipstream.speed.CFG_OPTIONS` are read from it alone.
        speed: the options in our own words, `'auto'` or a dict of `SpeedPlan`'s fields; else `cfg` may hold it.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        work_dir: str | Path,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        test_dataloader: Any = None,
        train_cfg: Mapping[str, Any] | None = None,
        val_cfg: Mapping[str, Any] | None = None,
        test_cfg: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Sequence[Any] | None = None,
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
        speed: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg or {}))
        # Every error of a build is placed in the whole configuration that was given.
        self._given = {**self.cfg, **{k: v for k, v in given.items() if k != "cfg" and v is not None}}
        self._scope = default_scope
        self.optim_wrapper: OptimWrapper | None = None
        self.param_schedulers: list[Any] | dict[str, list[Any]] | None = None
        self.step: Step
        self.resumed_random_state: dict[str, Any] | None = None
        self.is_training = self.resuming = self._loaded = self._compiled = False
        with self._reading():
            self._init_parts(given)
        # Each Runner has its own stream of random numbers, whatever others draw in the meantime.
        self._random_state = get_random_state()

    def _init_parts(self, given: dict[str, Any]) -> None:
        self._loops: dict[str, Any] = {mode: loop_options(mode, given) for mode in TRIPLES}
        self._training = {k: given[k] for k in ("auto_scale_lr", "optim_wrapper", "param_scheduler")}
        plan = planning.read_plan(given, self.cfg)
        self._randomness = options(Randomness, given["randomness"], "randomness")
        setup_env(given["launcher"], options(EnvOptions, given["env_cfg"], "env_cfg"))
        self.work_dir = str(Path(given["work_dir"]).expanduser().absolute())
        self._resume_from, seed = resume.find_resume(given["resume"], given["load_from"], self.work_dir)
        self._load_from = given["load_from"]
        self._set_seed(seed)
        self._open_logs(given)
        self.device = default_device()
        model = builders.build_model(given["model"], given["data_preprocessor"])
        capabilities = planning.capabilities_of(model, given["optim_wrapper"], self._randomness.deterministic)
        self.speed = planning.complete_plan(plan, capabilities, self.logger.info)
        with switches(self.speed, self.device, self.logger.warning):
            self.model: nn.Module = prepare_model(model, self.speed, self.device)
        self._training["optim_wrapper"] = plan_optim(given["optim_wrapper"], self.speed, self.device)
        self._hooks = HookList()
        for hook in [*with_defaults(given["default_hooks"], self.by_epoch), *planning.plan_hooks(self.speed)]:
            self._hooks.register(hook)
        if self.logger.console.is_terminal and is_main_process():
            self._hooks.register(ProgressBarHook())
        self.register_custom_hooks(given["custom_hooks"] or ())
        write_config(self.cfg, self.visualizer, self.logger, self.work_dir, self.timestamp)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """Build a Runner from a configuration whose keys are the constructor's arguments.

        Other keys (variables of the file, `compile`, `model_wrapper_cfg`) are kept in `runner.cfg`.
        """
        cfg = cfg if isinstance(cfg, Config) else Config(dict(cfg))
        for required in ("model", "work_dir"):
            if required not in cfg:
                hint = did_you_mean(required, cfg)
                raise ConfigError(f"the configuration needs '{required}'{hint}")
        names = [name for name in inspect.signature(cls).parameters if name != "cfg"]
        runner = cls(**{name: cfg[name] for name in names if name in cfg}, cfg=cfg)
        for line in unread_keys(cfg, [*names, *CFG_OPTIONS]):
            runner.logger.warning(line)
        return runner

    # ---- what a run does ---------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Train and return the model."""
        if self._loops["train"] is None:
            raise ConfigError("needs train_dataloader, train_cfg and optim_wrapper to train", "Runner")
        with self._running():
            self._build_training()
            self.call_hook("before_run")
            if not self._loaded:
                resume.init_weights(unwrap_model(self.model))
            self.load_or_resume()
            assert self.optim_wrapper is not None
            self.optim_wrapper.initialize_count_status(self.model, self.iter, self.max_iters)
            self.step = planning.make_step(
                self.model, self.optim_wrapper, self.speed, self.logger.warning, self.logger.info
            )
            self._compiled = self.is_training = True
            try:
                self.train_loop.run()
            finally:
                if isinstance(self.step, GraphStep):
                    self.step.pause()
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
            raise ConfigError(f"needs {mode}_dataloader, {mode}_cfg and {mode}_evaluator", "Runner")
        with self._running():
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
            with placing(self._given, "optim_wrapper"):
                self.optim_wrapper = builders.build_optim(self.model, self._training["optim_wrapper"])
            fuse_optim(self.optim_wrapper, self.speed)
            add_parts(self.speed, self.model, self.optim_wrapper)
            self.scale_lr(self.optim_wrapper, self._training["auto_scale_lr"])
            schedulers = self._training["param_scheduler"]
            self.param_schedulers = builders.build_schedulers(schedulers, self.optim_wrapper, loop)
        if self._loops["val"] is not None:
            self._loop("val")

    def scale_lr(self, optim_wrapper: OptimWrapper, auto_scale_lr: Mapping[str, Any] | None) -> None:
        """Scale every learning rate by the batch size over `base_batch_size`, if enabled."""
        if auto_scale_lr and auto_scale_lr.get("enable", False):
            self.logger.info(builders.scale_lr(optim_wrapper, auto_scale_lr, self.samples_per_step))

    def _compile(self) -> None:
        if self.speed.compile is not None and not self._compiled:
            compile_model(unwrap_model(self.model), self.speed.compile, self.logger.warning)
        self._compiled = True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Whatever happens inside, leave complete log files and a clean terminal behind."""
        set_random_state(self._random_state)
        try:
            with (
                self._reading(),
                self.logger.as_current(),
                self.message_hub.as_current(),
                switches(self.speed, self.device, self.logger.warning),
                compiling(self.speed, self.model, self.logger),
            ):
                yield
        except BaseException as error:
            if isinstance(error, Exception):
                # For the log file: the console hears of it from whoever catches the error.
                self.logger.debug(f"{type(error).__name__}: {error}", exc_info=True)
            raise
        finally:
            self._random_state = get_random_state()
            self.is_training = False
            for hook in self._hooks:
                if isinstance(hook, ProgressBarHook | GcHook | NanGuardHook):
                    hook.close()
            self._end_workers()
            self.visualizer.flush()
            self.logger.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Look names up in the run's scope, and place errors in the configuration that was given."""
        with placing(self._given), default_scope(self._scope):
            yield

    # ---- checkpoints ---------------------------------------------------------------------------------

    def load_or_resume(self) -> None:
        """Load `load_from`, or go on from the checkpoint to resume (without a training: load it); once."""
        if self._resume_from is not None and self.optim_wrapper is not None:
            self.resume(self._resume_from)
            self._resume_from = None
        elif not self._loaded and (source := self._resume_from or self._load_from):
            # A training may start from a part of the weights; a metric of random ones means nothing.
            self.load_checkpoint(source, strict=self.optim_wrapper is None)
        self._loaded = True

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: str | torch.device = "cpu",
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint and return it."""
        checkpoint = resume.read_checkpoint(unwrap_model(self.model), filename, map_location, revise_keys)
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        resume.take_weights(self, checkpoint, strict, str(filename))
        self.logger.info(f"Loaded {filename}")
        return checkpoint

    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: str | torch.device = "cpu",
    ) -> None:
        """Go on with the run that wrote the checkpoint, at the very step after it."""
        self.resuming = True
        checkpoint = self.load_checkpoint(filename, map_location, strict=True)
        resume.restore_training(self, checkpoint, resume_optimizer, resume_param_scheduler)
        self.resuming = False

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
    ) -> None:
        """Write the state of the run to `out_dir/filename`; call it on every rank.

        That of a sharded model becomes a folder (`epoch_3.sharded` for `epoch_3.pth`), each rank writing its part.

        Args:
            out_dir, filename: where to.
            save_optimizer, save_param_scheduler: whether their state is saved.
            meta: further entries of the checkpoint's `meta`.
            by_epoch: called from `after_train_epoch` (True), `after_train_iter` (False), or after both (None).
            mark_last: make it the one that `resume=True` takes.
            consolidate: write the file of a sharded model, too, gathered by rank 0.
        """
        self.read_logs()  # a run whose loss is no longer finite must not replace its checkpoints
        checkpoint = resume.make_checkpoint(self, by_epoch, save_optimizer, save_param_scheduler, meta)
        self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        path = write_checkpoint(checkpoint, Path(out_dir) / filename, self.logger.warning, consolidate)
        if mark_last and is_main_process():
            mark_last_checkpoint(self.work_dir, path)

    def restore_random_state(self) -> None:
        """Put the random generators where a resumed run left them, right before its first step."""
        resume.restore_random_state(self)

    def _set_seed(self, resumed: int | None) -> None:
        own = self._randomness.seed
        seed = own if resumed is None else resumed
        self.seed = set_random_seed(seed, self._randomness.deterministic, self._randomness.diff_rank_seed)
        self._replaced_seed = own if own is not None and own != self.seed else None

    # ---- hooks ---------------------------------------------------------------------------------------

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a hook; among equal priorities the earlier registered runs first."""
        self._hooks.register(hook, priority)

    def register_custom_hooks(self, hooks: Sequence[Hook | Mapping[str, Any]]) -> None:
        """Add several hooks."""
        for index, hook in enumerate(hooks):
            with placing(self._given, f"custom_hooks[{index}]"):
                self.register_hook(hook)

    @property
    def hooks(self) -> list[Hook]:
        """The registered hooks in the order in which they run."""
        return list(self._hooks)

    def hooks_at(self, stage: str) -> list[Callable[..., None]]:
        """Return the methods to call at `stage`, of those hooks that do something there."""
        return self._hooks.at(stage)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Run a stage, one of `Hook.stages` or any other that some hook defines."""
        for method in self._hooks.at(fn_name):
            method(self, **kwargs)

    # ---- logs ----------------------------------------------------------------------------------------

    def read_logs(self) -> None:
        """Bring losses, learning rates and momenta since the last call into the message hub.

        The only place where a training run waits for the device to tell it numbers.

        Raises:
            NonFiniteLossError: a loss was NaN or infinite.
        """
        self.meter.flush()
        self.call_hook("read_logs")
        if self.optim_wrapper is not None:
            for name, values in self.optim_wrapper.get_lr().items():
                self.message_hub.update_scalar(f"train/{name}", values[0])
        if self.is_training:
            self.message_hub.update_info_dict({"epoch": self.epoch, "iter": self.iter})

    def _open_logs(self, given: dict[str, Any]) -> None:
        file = self.cfg.filename
        name = name_run(Path(self.work_dir), given["experiment_name"] or (Path(file).stem if file else None))
        logs = open_logs(name, given["log_level"], self.by_epoch, given["log_processor"], given["visualizer"])
        self.timestamp, self.experiment_name = name.timestamp, name.experiment
        self.log_dir = str(name.log_dir)
        self.json_log = f"{name.timestamp}.json"
        self.logger, self.message_hub, self.meter = logs.logger, logs.hub, logs.meter
        self.log_processor, self.visualizer = logs.processor, logs.visualizer
        self.logger.info("Environment: " + ", ".join(f"{k} {v}" for k, v in collect_env().items()))
        self.logger.info(f"Seed: {self.seed}; work_dir: {self.work_dir}")
        if self._replaced_seed is not None:
            self.logger.warning(f"The resumed run's seed {self.seed} replaces {self._replaced_seed}")
        if given["resume"] is True and self._resume_from is None:
            self.logger.info(f"Nothing to resume in {self.work_dir}: starting anew")
