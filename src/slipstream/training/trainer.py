"""SuperGradients' `Trainer` and `KDTrainer`, implemented with the Runner."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from slipstream.checkpoint import find_latest_checkpoint, read_meta, stored_config
from slipstream.config.load import import_custom
from slipstream.config.placeholders import has_references
from slipstream.dataset import SegmentationDataset
from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dist import infer_launcher
from slipstream.errors import CheckpointError, ConfigError
from slipstream.evaluator import Evaluator
from slipstream.hooks import CheckpointHook
from slipstream.model import unwrap_model
from slipstream.runner import Runner
from slipstream.training.callbacks import HistoryHook, TestLoadersHook
from slipstream.training.config_paths import at_user_paths
from slipstream.training.distillation import KDModule, input_adapter
from slipstream.training.metrics import metric_config
from slipstream.training.params import plain
from slipstream.training.recipe import has_full_checkpoint, recipe_config, runner_config, work_dir
from slipstream.zoo.network import Network


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
        # Network of the last training run.
        self.net: nn.Module | None = None
        # Runner of the last training run.
        self.runner: Runner | None = None
        self._test_needs: tuple[str, ...] = ()
        self._teacher: Mapping[str, Any] | None = None

    @property
    def checkpoints_dir_path(self) -> str:
        """Absolute path of the run's folder, which contains checkpoints and logs."""
        return str(Path(work_dir(self.experiment_name, self.ckpt_root_dir)).absolute())

    @property
    def best_metric(self) -> float | None:
        """Best value of `metric_to_watch` in the last training run; None before a run, or if no value is monitored."""
        for hook in [] if self.runner is None else self.runner.hooks:
            if isinstance(hook, CheckpointHook) and hook.monitors and self.runner is not None:
                name = next(iter(hook.monitors))
                return self.runner.message_hub.get_info(f"best_score/{name}")
        return None

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
        if train_loader is None:
            raise ConfigError("is required; pass a DataLoader that yields (images, targets)", "train_loader")
        params = {**self.training_params, **plain(training_params or {})}
        tests = dict(test_loaders or {})
        test_loader = next(iter(tests.values()), valid_loader)
        cfg = runner_config(
            self.experiment_name,
            self.ckpt_root_dir,
            params,
            {"network": model, **(self._teacher or {})},
            train_loader,
            valid_loader,
            # `test` can replace the test loader only if the Runner was created with one.
            train_loader if test_loader is None else test_loader,
            infer_launcher(),
        )
        if tests:
            cfg["custom_hooks"].append(TestLoadersHook(tests, params.get("run_test_freq") or 1))
        if additional_configs_to_log is not None:
            cfg["additional_configs_to_log"] = plain(additional_configs_to_log)
        self.net = model
        needs = {"test_loader": test_loader, "test_metrics_list": params.get("valid_metrics_list")}
        self._test_needs = tuple(name for name, default in needs.items() if not default)
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
                _store_processing(model.network, getattr(self.runner.val_dataloader, "dataset", None))
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
            silent_mode: whether to log only warnings and errors.
            use_ema_net: whether to test the EMA weights if the network was trained with `ema`.
        """
        last, network = self.runner, self.net if model is None else model
        given = {"model": network, "test_loader": test_loader, "test_metrics_list": test_metrics_list}
        if missing := [name for name in (self._test_needs if last else given) if given[name] is None]:
            raise ConfigError(f"requires {' and '.join(missing)}; no earlier training run has them", "test")
        metrics: Any = metric_config(test_metrics_list, "test_metrics_list")
        if last is None or not use_ema_net or network is not self.net:
            loop = None if last is None else last.test_loop
            return Runner(
                model={"type": "SupervisedModel", "network": network},
                work_dir=self.checkpoints_dir_path,
                test_dataloader=loop.dataloader if loop and test_loader is None else test_loader,
                test_cfg={},
                test_evaluator=loop.evaluator if loop and test_metrics_list is None else metrics,
                launcher=infer_launcher(),
                log_level="WARNING" if silent_mode else "INFO",
                experiment_name=self.experiment_name,
            ).test()
        # The model of the last Runner is on the device, and may have EMA weights.
        loop = last.test_loop
        before = loop.dataloader, loop.evaluator
        if test_loader is not None:
            loop.dataloader = build_dataloader(test_loader, last.seed, "test_loader", training=False)
        if test_metrics_list is not None:
            loop.evaluator = Evaluator(metrics)
        if (meta := getattr(loop.dataloader.dataset, "metainfo", None)) is not None:
            loop.evaluator.dataset_meta = meta
        level = last.logger.level
        try:
            if silent_mode:
                last.logger.setLevel(logging.WARNING)
            return last.test()
        finally:
            loop.dataloader, loop.evaluator = before
            last.logger.setLevel(level)

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
        return cls(recipe["experiment_name"], ckpt_root_dir=recipe.get("ckpt_root_dir"))._train_config(config)

    def _train_config(self, cfg: Mapping[str, Any]) -> tuple[nn.Module, list[dict[str, float]]]:
        history = self._run(cfg)
        model: Any = None if self.runner is None else unwrap_model(self.runner.model)
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
        training = ("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler", "resume")
        kept = {key: value for key, value in recipe.items() if key not in training}
        initialize = has_full_checkpoint(recipe)
        if not initialize:
            name = plain(cfg).get("training_hyperparams", {}).get("ckpt_name") or "ckpt_latest.pth"
            path = Path(recipe["work_dir"]) / name
            if not path.exists():
                raise CheckpointError(f"{path} does not exist; set checkpoint_params.checkpoint_path")
            kept["load_from"] = str(path)
        with at_user_paths(recipe):
            runner = Runner.from_cfg(kept)
            model: Any = unwrap_model(runner.model)
            if initialize:
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
            raise CheckpointError(f"no checkpoint found in {trainer.checkpoints_dir_path}")
        cfg = stored_config(read_meta(path))
        if "model" not in cfg or has_references(cfg):
            raise CheckpointError(
                f"the configuration of {path} contains Python objects or environment variables, which are not stored; "
                "train with the original configuration and resume=True"
            )
        import_custom(cfg, str(path), trust)
        return trainer._train_config({**cfg, "resume": str(path), "launcher": infer_launcher()})


class KDTrainer(Trainer):
    """Train a student network with the outputs of a frozen teacher; see `Trainer` and `DistillationModel`.

    `net` and the checkpoints contain only the student.
    """

    def train(  # type: ignore[override]  # SuperGradients' argument order
        self,
        model: nn.Module | None = None,
        training_params: Mapping[str, Any] | None = None,
        student: nn.Module | None = None,
        teacher: nn.Module | None = None,
        kd_architecture: str | type[KDModule] = "kd_module",
        kd_arch_params: Mapping[str, Any] | None = None,
        run_teacher_on_eval: bool = True,
        **loaders: Any,
    ) -> list[dict[str, float]]:
        """Train `student` in place, and return the metrics of each validation run; see `Trainer.train`.

        Args:
            model: a `KDModule`. If it is set, the arguments from `student` to `run_teacher_on_eval` are ignored.
            training_params: keys of `TrainingParams`. The loss receives a `KDOutput`.
            student, teacher: modules. The teacher is frozen in place.
            kd_architecture: 'kd_module', or a subclass of `KDModule`.
            kd_arch_params: a dict with the optional key `teacher_input_adapter`; see `KDModule`.
            run_teacher_on_eval: must be True.
            loaders: `train_loader` and the following arguments of `Trainer.train`.

        Raises:
            UnknownNameError, ConfigError: if a key or value is invalid or not supported.
        """
        kind: Any = KDModule if kd_architecture == "kd_module" else kd_architecture
        if not (isinstance(kind, type) and issubclass(kind, KDModule)):
            raise ConfigError(f"must be 'kd_module' or a KDModule class, not {kind!r}", "kd_architecture")
        if model is None:
            options = input_adapter(kd_arch_params, "kd_arch_params")
            model = kind(options, student, teacher, run_teacher_on_eval)
        if not isinstance(model, KDModule):
            raise ConfigError("must be a KDModule; alternatively, pass student=... and teacher=...", "model")
        if type(model).forward is not KDModule.forward:
            raise ConfigError("KDModule.forward cannot be overridden; write your own loss instead", "model")
        self._teacher = {"teacher": model.teacher, "teacher_input_adapter": model.teacher_input_adapter}
        return super().train(model.student, training_params, **loaders)


def _store_processing(network: nn.Module, dataset: Any) -> None:
    """Store the class names and transforms of the validation data in a network from the zoo, for `network.predict`."""
    while isinstance(
        inner := getattr(dataset, "dataset", None) or next(iter(getattr(dataset, "datasets", ())), None),
        Dataset,
    ):
        dataset = inner  # of a wrapper, or the first of several
    meta, is_segmentation = getattr(dataset, "metainfo", None), isinstance(dataset, SegmentationDataset)
    transforms = getattr(dataset, "transforms" if is_segmentation else "all_transforms", None)
    if not isinstance(network, Network) or not isinstance(meta, Mapping) or transforms is None:
        return
    if is_segmentation is (network.task == "segmentation"):
        network.set_processing_from_data(meta.get("classes"), transforms, meta.get("palette"))
