"""Visualization backends for tracking services: Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.extras import extra
from slipstream.registry import VISBACKENDS
from slipstream.visualization.backends import BaseVisBackend
from slipstream.visualization.values import as_dict, as_text, check_image, flatten, scalars_in

if TYPE_CHECKING:
    import numpy.typing as npt


class _FinishedBackend(BaseVisBackend):
    """A backend whose `experiment` is a run with a `finish` method."""

    def close(self) -> None:
        """Finish the run, if it was started."""
        if "experiment" in self.__dict__:
            self.experiment.finish()


@VISBACKENDS.register_module()
class WandbVisBackend(_FinishedBackend):
    """Log to a Weights & Biases run.

    Args:
        save_dir: folder for local files.
        init_kwargs: arguments of `wandb.init` (`project`, `name`, `mode`, ...).
        define_metric_cfg: a dict that maps metrics to summaries (`{"val/mIoU": "max"}`), or a list of dicts with the
            arguments of `Run.define_metric`.
        commit: whether each call completes a W&B step.
        log_code_name: name under which to upload the source code. By default, the code is not uploaded.

    Raises:
        ConfigError: on first use, if the wandb package is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path,
        init_kwargs: dict[str, Any] | None = None,
        define_metric_cfg: dict[str, str] | list[dict[str, Any]] | None = None,
        commit: bool = True,
        log_code_name: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        self.init_kwargs = dict(init_kwargs or {})
        self.define_metric_cfg = define_metric_cfg or []
        self.commit = commit
        self.log_code_name = log_code_name

    @cached_property
    def experiment(self) -> Any:
        """The `wandb.Run`."""
        with extra("wandb"):
            import wandb

        self.save_dir.mkdir(parents=True, exist_ok=True)
        run = wandb.init(**{"dir": str(self.save_dir), **self.init_kwargs})
        # Training and validation count steps separately, but W&B's step must not decrease. Therefore, log the step as a
        # metric.
        run.define_metric("*", step_metric="step")
        metrics = self.define_metric_cfg
        if isinstance(metrics, Mapping):
            metrics = [{"name": name, "summary": kind} for name, kind in metrics.items()]
        for metric in metrics:
            run.define_metric(**{"step_metric": "step", **metric})
        return run

    def add_config(self, config: Any) -> None:
        """Record the configuration, and the source code if `log_code_name` is set."""
        self.experiment.config.update(as_dict(config), allow_val_change=True)
        if self.log_code_name is not None:
            self.experiment.log_code(name=self.log_code_name)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Record the numeric values."""
        self.experiment.log({**scalars_in(scalar_dict), "step": step}, commit=self.commit)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Record an image."""
        run = self.experiment  # reports a missing package before the import below
        import wandb

        run.log({name: wandb.Image(check_image(name, image)), "step": step}, commit=self.commit)


@VISBACKENDS.register_module()
class TrackioVisBackend(_FinishedBackend):
    """Log to a Trackio run. Trackio stores runs on this machine, or on a server that `init_kwargs` names.

    Args:
        save_dir: a folder whose two parents are the default names of the project and the run.
        init_kwargs: arguments of `trackio.init` (`project`, `name`, `resume`, `server_url`, ...).
    """

    def __init__(self, save_dir: str | Path, init_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(save_dir)
        run = self.save_dir.absolute().parent
        names = {"project": run.parent.name, "name": run.name}
        self.init_kwargs = {**names, "embed": False, **(init_kwargs or {})}

    @cached_property
    def experiment(self) -> Any:
        """The `trackio.Run`."""
        with extra("trackio"):
            import trackio

        return trackio.init(**self.init_kwargs)

    def add_config(self, config: Any) -> None:
        """Record the configuration."""
        self.experiment.config.update(as_dict(config))

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Record the numeric values."""
        self.experiment.log(scalars_in(scalar_dict), step=step)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Record an image."""
        run = self.experiment  # reports a missing package before the import below
        import trackio

        run.log({name: trackio.Image(check_image(name, image))}, step=step)


@VISBACKENDS.register_module()
class MLflowVisBackend(BaseVisBackend):
    """Log to a run on an MLflow server or in a local MLflow store. Each backend creates its own run.

    Args:
        save_dir: folder with the files to upload.
        exp_name: name of the experiment.
        run_name: name of the run. Default: the names of the two folders that contain `save_dir`, for example
            `street_scenes_pp_lite_t/20261126_101500`.
        tags: tags of the run.
        params: parameters to record in addition to the configuration.
        tracking_uri: URI of the server or store. Default: MLflow's setting (environment variable
            MLFLOW_TRACKING_URI).
        artifact_suffix: suffixes of the files in `save_dir` to upload at the end of the run.
        tracked_config_keys: top-level keys of the configuration to record. Default: all keys.

    Raises:
        ConfigError: on first use, if the mlflow package is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path,
        exp_name: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
        params: dict[str, Any] | None = None,
        tracking_uri: str | None = None,
        artifact_suffix: str | Sequence[str] = (".json", ".log", ".py", ".yaml"),
        tracked_config_keys: list[str] | None = None,
    ) -> None:
        super().__init__(save_dir)
        self.exp_name = exp_name or "Default"
        # MLflow's own default is drawn from the random numbers that the run's seed determines.
        self.run_name = run_name or Path(*self.save_dir.absolute().parts[-3:-1]).as_posix()
        self.tags = dict(tags or {})
        self.params = dict(params or {})
        self.tracking_uri = tracking_uri
        self.artifact_suffix = (
            (artifact_suffix,) if isinstance(artifact_suffix, str) else tuple(artifact_suffix)
        )
        self.tracked_config_keys = tracked_config_keys

    @cached_property
    def experiment(self) -> Any:
        """The `mlflow.MlflowClient`; see `run_id` for its run."""
        with extra("mlflow"):
            import mlflow

        return mlflow.MlflowClient(tracking_uri=self.tracking_uri)

    @cached_property
    def run_id(self) -> str:
        """The id of the run; the first access creates the run."""
        experiment = self.experiment.get_experiment_by_name(self.exp_name)
        experiment_id = (
            experiment.experiment_id if experiment else self.experiment.create_experiment(self.exp_name)
        )
        run = self.experiment.create_run(experiment_id, run_name=self.run_name, tags=self.tags)
        run_id = str(run.info.run_id)
        self._log_params(run_id, flatten(self.params))
        return run_id

    def add_config(self, config: Any) -> None:
        """Record the values of the configuration as parameters, and its text as `config.py`."""
        tree = as_dict(config)
        keys = tree if self.tracked_config_keys is None else self.tracked_config_keys
        self._log_params(self.run_id, flatten({key: tree[key] for key in keys if key in tree}))
        self.experiment.log_text(self.run_id, as_text(config), "config.py")

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Record the numeric values in one request."""
        run_id, now, numbers = self.run_id, int(time.time() * 1000), scalars_in(scalar_dict).items()
        from mlflow.entities import Metric

        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in numbers]
        self.experiment.log_batch(run_id, metrics=metrics)

    def add_image(self, name: str, image: npt.NDArray[np.uint8], step: int = 0) -> None:
        """Record an image as `<name>_<step>.png`."""
        self.experiment.log_image(self.run_id, check_image(name, image), f"{name}_{step}.png")

    def close(self) -> None:
        """Upload the artifacts and end the run, if it was started."""
        self.end_run()

    def end_run(self, failed: bool = False) -> None:
        """Upload the artifacts and set the status of the run, if it was started. Values can still be added."""
        if "run_id" not in self.__dict__:
            return
        for path in sorted(self.save_dir.rglob("*")):
            if path.is_file() and path.name.endswith(self.artifact_suffix):
                folder = path.parent.relative_to(self.save_dir).as_posix()
                self.experiment.log_artifact(self.run_id, str(path), None if folder == "." else folder)
        self.experiment.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _log_params(self, run_id: str, params: Iterable[tuple[str, Any]]) -> None:
        from mlflow.entities import Param

        # The tracking service accepts at most 6,000 characters per value and 100 parameters per request.
        entries = [Param(_mlflow_name(name), str(value)[:6000]) for name, value in params]
        for start in range(0, len(entries), 100):
            self.experiment.log_batch(run_id, params=entries[start : start + 100])


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
