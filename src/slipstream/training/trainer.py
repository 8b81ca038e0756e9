"""SuperGradients' `Trainer`: its words in, a Runner's work out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.checkpoint import find_latest_checkpoint, read_meta
from slipstream.config import Config
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dist import infer_launcher
from slipstream.errors import CheckpointError, ConfigError
from slipstream.evaluator import Evaluator
from slipstream.model import unwrap_model
from slipstream.runner import Runner
from slipstream.training.config_paths import at_user_paths
from slipstream.training.hooks import HistoryHook, TestLoadersHook
from slipstream.training.metrics import metric_config
from slipstream.training.params import plain
from slipstream.training.recipe import pretrained_whole, recipe_config
from slipstream.training.translate import runner_config, work_dir

__all__ = ["Trainer"]


class Trainer:
    """Trains and tests networks by SuperGradients' words; the `Runner` it makes does all the work.

    Under a launcher (torchrun, Slurm, MPI) the processes train together.

    Args:
        experiment_name: names the run and its folder.
        ckpt_root_dir: where that folder is made; by default `work_dirs`.
        training_params: for every `train`, which may change some of them.
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
        """The network that was trained last."""
        self.runner: Runner | None = None
        """The Runner of the last training."""
        self._test_needs: tuple[str, ...] = ()

    @property
    def checkpoints_dir_path(self) -> str:
        """The folder of checkpoints and logs."""
        return str(Path(work_dir(self.experiment_name, self.ckpt_root_dir)).absolute())

    def train(
        self,
        model: nn.Module,
        training_params: Mapping[str, Any] | None = None,
        train_loader: Any = None,
        valid_loader: Any = None,
        test_loaders: Mapping[str, Any] | None = None,
        additional_configs_to_log: Mapping[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        """Train `model`, which holds the trained weights afterwards; what the training froze is free again.

        Args:
            model: a module that returns logits, or a tuple that begins with them.
            training_params: by the keys of `TrainingParams`.
            train_loader, valid_loader: of pairs (images, targets), or of dicts with `inputs` and `targets`.
            test_loaders: further data sets, by name, to evaluate every `run_test_freq` epochs.
            additional_configs_to_log: is written down with the run's configuration.

        Returns:
            The metrics of every validation, and the `epoch` after which it was.

        Raises:
            UnknownNameError, ConfigError: a key or value that cannot be honoured.
        """
        if train_loader is None:
            raise ConfigError("is needed: a DataLoader of (images, targets)", "train_loader")
        params = {**self.training_params, **plain(training_params or {})}
        tests = dict(test_loaders or {})
        unseen = next(iter(tests.values()), valid_loader)
        cfg = runner_config(
            experiment_name=self.experiment_name,
            ckpt_root_dir=self.ckpt_root_dir,
            network=model,
            training_params=params,
            train_dataloader=train_loader,
            val_dataloader=valid_loader,
            # The Runner of a training that has no data to test on can still be given some.
            test_dataloader=train_loader if unseen is None else unseen,
            launcher=infer_launcher(),
        )
        if tests:
            cfg["custom_hooks"].append(TestLoadersHook(tests, params.get("run_test_freq") or 1))
        if additional_configs_to_log is not None:
            cfg["additional_configs_to_log"] = plain(additional_configs_to_log)
        self.net = model
        needs = {"test_loader": unseen is None, "test_metrics_list": not params.get("valid_metrics_list")}
        self._test_needs = tuple(name for name, missing in needs.items() if missing)
        learns = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            return self._run(cfg)
        finally:
            for parameter, flag in learns:
                parameter.requires_grad_(flag)

    def _run(self, cfg: Mapping[str, Any]) -> list[dict[str, float]]:
        history = HistoryHook()
        with at_user_paths(cfg):
            self.runner = Runner.from_cfg(cfg)
            self.runner.register_hook(history)
            self.runner.train()
        return history.history

    def test(
        self,
        model: nn.Module | None = None,
        test_loader: Any = None,
        test_metrics_list: list[Any] | None = None,
        silent_mode: bool = False,
        use_ema_net: bool = True,
    ) -> dict[str, float]:
        """Return the metrics of a network on a data set.

        Args:
            model: by default the network of the last training.
            test_loader: the data; by default the validation's of the last training.
            test_metrics_list: as `valid_metrics_list`, which it is by default.
            silent_mode: log warnings alone.
            use_ema_net: of a training with `ema`, test the average.
        """
        own = self.runner is not None and use_ema_net and model in (None, self.net)
        needs = self._test_needs if self.runner is not None else ("model", "test_loader", "test_metrics_list")
        given = {
            "model": self.net if model is None else model,
            "test_loader": test_loader,
            "test_metrics_list": test_metrics_list,
        }
        if missing := [name for name in needs if given[name] is None]:
            raise ConfigError(f"needs {' and '.join(missing)}: no training has left any", "test")
        if own:
            return self._test_trained(test_loader, test_metrics_list)
        left = None if self.runner is None else self.runner.test_loop
        metrics: Any = metric_config(test_metrics_list, "test_metrics_list")
        runner = Runner(
            model={"type": "SupervisedModel", "network": given["model"]},
            work_dir=self.checkpoints_dir_path,
            test_dataloader=left.dataloader if left is not None and test_loader is None else test_loader,
            test_cfg={},
            test_evaluator=left.evaluator if left is not None and test_metrics_list is None else metrics,
            launcher=infer_launcher(),
            log_level="WARNING" if silent_mode else "INFO",
            experiment_name=self.experiment_name,
        )
        return runner.test()

    def _test_trained(self, test_loader: Any, metrics: list[Any] | None) -> dict[str, float]:
        """Let the training's own Runner test: it has the average, and the model wherever it is."""
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
            return self.runner.test()
        finally:
            loop.dataloader, loop.evaluator = before

    # ---- recipes ---------------------------------------------------------------------------------------

    @classmethod
    def train_from_config(cls, cfg: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        """Train by a composed recipe; return the network and the metrics of every validation."""
        recipe = plain(cfg)
        trainer = cls(recipe["experiment_name"], recipe.get("ckpt_root_dir"))
        return trainer._train_config(recipe_config(recipe, infer_launcher()))

    def _train_config(self, cfg: Mapping[str, Any]) -> tuple[nn.Module, list[dict[str, float]]]:
        history = self._run(cfg)
        assert self.runner is not None
        model: Any = unwrap_model(self.runner.model)
        self.net = model.network
        return model.network, history

    @classmethod
    def evaluate_from_recipe(cls, cfg: Any) -> tuple[nn.Module, dict[str, float]]:
        """Validate the network of a composed recipe; return it and its metrics.

        Its weights are those of `checkpoint_params.checkpoint_path`, or, if there is none or it holds a backbone only,
        those of the experiment's folder.

        Raises:
            CheckpointError: there are neither.
        """
        recipe = recipe_config(plain(cfg), infer_launcher())
        weights = {}
        if not pretrained_whole(recipe):
            name = plain(cfg).get("training_hyperparams", {}).get("ckpt_name") or "ckpt_latest.pth"
            weights["load_from"] = _existing(Path(recipe["work_dir"]) / name)
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
        cls, experiment_name: str, ckpt_root_dir: str | Path | None = None
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        """Go on with an experiment of a recipe from its newest checkpoint, by the configuration in it.

        Raises:
            CheckpointError: there is none, or the experiment was made of objects that no file holds.
        """
        trainer = cls(experiment_name, ckpt_root_dir)
        path = find_latest_checkpoint(trainer.checkpoints_dir_path)
        if path is None:
            raise CheckpointError(f"there is no checkpoint in {trainer.checkpoints_dir_path} to go on from")
        cfg = Config.fromstring(read_meta(path).get("cfg", ""), "yaml")
        if "model" not in cfg:
            raise CheckpointError(f"{path} was made of Python objects: make them and train with resume=True")
        return trainer._train_config({**cfg, "resume": str(path), "launcher": infer_launcher()})


def _existing(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give checkpoint_params.checkpoint_path")
    return str(path)
