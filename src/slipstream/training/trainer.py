"""SuperGradients' `Trainer`, implemented with the Runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.checkpoint import find_latest_checkpoint, read_meta, stored_config
from slipstream.config.load import import_custom
from slipstream.config.placeholders import has_references
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dist import infer_launcher
from slipstream.errors import CheckpointError, ConfigError
from slipstream.evaluator import Evaluator
from slipstream.hooks import CheckpointHook
from slipstream.model import unwrap_model
from slipstream.runner import Runner
from slipstream.training.config_paths import at_user_paths
from slipstream.training.describe import store_processing
from slipstream.training.hooks import HistoryHook, TestLoadersHook
from slipstream.training.metrics import metric_config
from slipstream.training.params import plain
from slipstream.training.recipe import has_full_checkpoint, recipe_config
from slipstream.training.translate import runner_config, work_dir

__all__ = ["Trainer"]


class Trainer:
    """Train and test networks with SuperGradients' interface, using a `Runner`.

    Under a launcher (torchrun, Slurm, MPI), all processes train together.

    Args:
        experiment_name: name of the run and of its folder.
        ckpt_root_dir: parent folder of the run's folder. Default: `work_dirs`.
        training_params: default training parameters, which `train` can override.
    """

    def __init__(
        self,
        experiment_name: str,
        ckpt_root_dir: str | Path | None = None,
        training_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.experiment_name = experiment_name
        self.ckpt_root_dir = ckpt_root_dir
        self.training_params = dict(plain(training_params or {}))
        self.net: nn.Module | None = None
        """Network of the last training run."""
        self.runner: Runner | None = None
        """Runner of the last training run."""
        self._test_needs: tuple[str, ...] = ()

    @property
    def checkpoints_dir_path(self) -> str:
        """Absolute path of the run's folder, which contains checkpoints and logs."""
        return str(Path(work_dir(self.experiment_name, self.ckpt_root_dir)).absolute())

    @property
    def best_metric(self) -> float | None:
        """Best value of `metric_to_watch` in the last training run; None before a run, or if no value is monitored."""
        hooks = [] if self.runner is None else self.runner.hooks
        names = [name for hook in hooks if isinstance(hook, CheckpointHook) for name in hook.monitors]
        if self.runner is None or not names:
            return None
        best: float | None = self.runner.message_hub.get_info(f"best_score/{names[0]}")
        return best

    def train(
        self,
        model: nn.Module,
        training_params: Mapping[str, Any] | None = None,
        train_loader: Any = None,
        valid_loader: Any = None,
        test_loaders: Mapping[str, Any] | None = None,
        additional_configs_to_log: Mapping[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        """Train `model` in place. Parameters that the run freezes are unfrozen afterwards.

        Args:
            model: a module that returns logits, or a tuple whose first element is the logits.
            training_params: keys of `TrainingParams`.
            train_loader, valid_loader: data loaders that yield (images, targets) pairs, or dicts with `inputs` and
                `targets`.
            test_loaders: additional data loaders by name. The model is evaluated on them every `run_test_freq` epochs.
            additional_configs_to_log: values to save with the run's configuration.

        Returns:
            The metrics of each validation run, with the number of completed epochs as `epoch`.

        Raises:
            UnknownNameError, ConfigError: if a key or value is invalid or not supported.
        """
        return self._train_network(
            model, training_params, train_loader, valid_loader, test_loaders, additional_configs_to_log
        )

    def _train_network(
        self,
        model: nn.Module,
        training_params: Mapping[str, Any] | None,
        train_loader: Any,
        valid_loader: Any,
        test_loaders: Mapping[str, Any] | None,
        additional_configs_to_log: Mapping[str, Any] | None,
        teacher: Mapping[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        """Train `model`. `teacher` contains the arguments of `DistillationModel` that describe the teacher."""
        if train_loader is None:
            raise ConfigError("is required; pass a DataLoader that yields (images, targets)", "train_loader")
        params = {**self.training_params, **plain(training_params or {})}
        tests = dict(test_loaders or {})
        test_loader = next(iter(tests.values()), valid_loader)
        cfg = runner_config(
            experiment_name=self.experiment_name,
            ckpt_root_dir=self.ckpt_root_dir,
            network=model,
            training_params=params,
            train_dataloader=train_loader,
            val_dataloader=valid_loader,
            # `test` can replace the test loader only if the Runner was created with one.
            test_dataloader=train_loader if test_loader is None else test_loader,
            launcher=infer_launcher(),
            teacher=teacher,
        )
        if tests:
            cfg["custom_hooks"].append(TestLoadersHook(tests, params.get("run_test_freq") or 1))
        if additional_configs_to_log is not None:
            cfg["additional_configs_to_log"] = plain(additional_configs_to_log)
        self.net = model
        needs = {
            "test_loader": test_loader is None,
            "test_metrics_list": not params.get("valid_metrics_list"),
        }
        self._test_needs = tuple(name for name, missing in needs.items() if missing)
        trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            return self._run(cfg)
        finally:
            for parameter, flag in trainable:
                parameter.requires_grad_(flag)

    def _run(self, cfg: Mapping[str, Any]) -> list[dict[str, float]]:
        history = HistoryHook()
        with at_user_paths(cfg):
            self.runner = Runner.from_cfg(cfg)
            self.runner.register_hook(history)
            self.runner.train()
            if self.runner.val_loop is not None:
                model: Any = unwrap_model(self.runner.model)
                store_processing(model.network, getattr(self.runner.val_dataloader, "dataset", None))
        return history.history

    def test(
        self,
        model: nn.Module | None = None,
        test_loader: Any = None,
        test_metrics_list: list[Any] | None = None,
        silent_mode: bool = False,
        use_ema_net: bool = True,
    ) -> dict[str, float]:
        """Evaluate a network on a dataset, and return the metrics.

        Args:
            model: the network. Default: the network of the last call to `train`.
            test_loader: the data loader. Default: the first test loader of the last call to `train`, or its validation
                loader if there is no test loader.
            test_metrics_list: the metrics, in the same format as `valid_metrics_list`, which is the default.
            silent_mode: whether to print only warnings and errors to the console.
            use_ema_net: whether to test the EMA weights if the network was trained with `ema`.
        """
        use_last_run = self.runner is not None and use_ema_net and model in (None, self.net)
        needs = self._test_needs if self.runner is not None else ("model", "test_loader", "test_metrics_list")
        arguments = {
            "model": self.net if model is None else model,
            "test_loader": test_loader,
            "test_metrics_list": test_metrics_list,
        }
        if missing := [name for name in needs if arguments[name] is None]:
            raise ConfigError(
                f"requires {' and '.join(missing)}; no previous training run provides a default", "test"
            )
        if use_last_run:
            return self._test_trained(test_loader, test_metrics_list, silent_mode)
        last_loop = None if self.runner is None else self.runner.test_loop
        metrics: Any = metric_config(test_metrics_list, "test_metrics_list")
        runner = Runner(
            model={"type": "SupervisedModel", "network": arguments["model"]},
            work_dir=self.checkpoints_dir_path,
            test_dataloader=last_loop.dataloader
            if last_loop is not None and test_loader is None
            else test_loader,
            test_cfg={},
            test_evaluator=last_loop.evaluator
            if last_loop is not None and test_metrics_list is None
            else metrics,
            launcher=infer_launcher(),
            log_level="WARNING" if silent_mode else "INFO",
            experiment_name=self.experiment_name,
        )
        return runner.test()

    def _test_trained(
        self, test_loader: Any, metrics: list[Any] | None, silent_mode: bool
    ) -> dict[str, float]:
        """Test with the Runner of the last training run; its model is on the device and may have EMA weights."""
        assert self.runner is not None
        loop = self.runner.test_loop
        before = loop.dataloader, loop.evaluator
        if test_loader is not None:
            loop.dataloader = build_dataloader(test_loader, self.runner.seed, "test_loader", training=False)
        if metrics is not None:
            loop.evaluator = Evaluator(metric_config(metrics, "test_metrics_list"))
        if (meta := getattr(loop.dataloader.dataset, "metainfo", None)) is not None:
            loop.evaluator.dataset_meta = meta
        try:
            with _quiet(self.runner.logger) if silent_mode else nullcontext():
                return self.runner.test()
        finally:
            loop.dataloader, loop.evaluator = before

    # ---- recipes ---------------------------------------------------------------------------------------

    @classmethod
    def train_from_config(cls, cfg: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        """Train the network of a composed recipe. Return the network and the metrics of each validation run.

        Raises:
            ConfigError: if a key is missing, invalid or not supported.
        """
        recipe = plain(cfg)
        if not isinstance(recipe, Mapping):
            raise ConfigError(f"must be a composed recipe, not {cfg!r}", "cfg")
        config = recipe_config(recipe, infer_launcher())
        trainer = cls(recipe["experiment_name"], ckpt_root_dir=recipe.get("ckpt_root_dir"))
        return trainer._train_config(config)

    def _train_config(self, cfg: Mapping[str, Any]) -> tuple[nn.Module, list[dict[str, float]]]:
        history = self._run(cfg)
        assert self.runner is not None
        model: Any = unwrap_model(self.runner.model)
        self.net = model.network
        return model.network, history

    @classmethod
    def evaluate_from_recipe(cls, cfg: Any) -> tuple[nn.Module, dict[str, float]]:
        """Validate the network of a composed recipe. Return the network and its metrics.

        The weights are loaded from `checkpoint_params.checkpoint_path`. If this path is not set, or if
        `load_backbone` is set, the weights are loaded from the file `ckpt_name` in the experiment's folder.

        Raises:
            CheckpointError: if the checkpoint does not exist.
        """
        recipe = recipe_config(plain(cfg), infer_launcher())
        weights = {}
        if not has_full_checkpoint(recipe):
            name = plain(cfg).get("training_hyperparams", {}).get("ckpt_name") or "ckpt_latest.pth"
            weights["load_from"] = _check_exists(Path(recipe["work_dir"]) / name)
        training = ("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler", "resume")
        with at_user_paths(recipe):
            runner = Runner.from_cfg(
                {key: value for key, value in recipe.items() if key not in training} | weights
            )
            model: Any = unwrap_model(runner.model)
            if not weights:
                model.init_weights()
            return model.network, runner.val()

    @classmethod
    def resume_experiment(
        cls, experiment_name: str, ckpt_root_dir: str | Path | None = None, *, trust: bool = False
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        """Resume an experiment from its latest checkpoint, with the configuration stored in the checkpoint.

        With `trust`, the stored configuration may import modules; see `Config.fromfile`. Environment variables and
        files that the configuration refers to are never read.

        Raises:
            CheckpointError: if there is no checkpoint, if the configuration contains objects that cannot be stored, or
                if it refers to environment variables.
        """
        trainer = cls(experiment_name, ckpt_root_dir=ckpt_root_dir)
        path = find_latest_checkpoint(trainer.checkpoints_dir_path)
        if path is None:
            raise CheckpointError(
                f"no checkpoint found in {trainer.checkpoints_dir_path}; check experiment_name and ckpt_root_dir"
            )
        cfg = stored_config(read_meta(path))
        if "model" not in cfg:
            raise CheckpointError(
                f"the configuration of {path} contains Python objects; create them again, and train with resume=True"
            )
        if has_references(cfg):
            raise CheckpointError(
                f"the configuration of {path} refers to environment variables ({{{{ $NAME }}}}), which are not "
                "resolved for a checkpoint; train with the original configuration and resume=True"
            )
        import_custom(cfg, str(path), trust)
        return trainer._train_config({**cfg, "resume": str(path), "launcher": infer_launcher()})


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Print only warnings and errors to the console within the context. The log file is not affected."""
    consoles = [handler for handler in logger.handlers if not isinstance(handler, logging.FileHandler)]
    levels = [console.level for console in consoles]
    for console in consoles:
        console.setLevel(max(console.level, logging.WARNING))
    try:
        yield
    finally:
        for console, level in zip(consoles, levels, strict=True):
            console.setLevel(level)


def _check_exists(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; set checkpoint_params.checkpoint_path")
    return str(path)
