"""`slipstream check`: validate a recipe, and run one training batch and one validation batch."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.cli.configure import configure
from slipstream.cli.processes import interrupt_on_sigterm
from slipstream.config import add_config_path
from slipstream.hooks import Hook, HookList
from slipstream.registry import default_scope
from slipstream.runner.logs import build_visualizer
from slipstream.runner.user_config import with_defaults

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.runner import Runner


def run(args: argparse.Namespace) -> int:
    """Print the results of the checks. This command writes files only to a temporary folder.

    Raises:
        SlipstreamError: the recipe is invalid, or a batch fails.
    """
    for part, values in _check(configure(args)).items():
        print(f"{part}: {', '.join(f'{k} {v:.4g}' for k, v in values.items())}")
    print(f"{args.config} is valid")
    return 0


class _Results(Hook):
    """Records the loss of the training step and the metrics of validation."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.loss: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        self.loss = {"loss": float(outputs["loss"])} if outputs and "loss" in outputs else {}

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}


def _check(cfg: Config) -> dict[str, dict[str, Any]]:
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths

    found, scope = _Results(), cfg.get("default_scope", "slipstream")
    with (
        interrupt_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="slipstream-") as folder,
        at_user_paths(cfg),
    ):
        if isinstance(visualizer := cfg.get("visualizer"), Mapping):
            with default_scope(scope):
                build_visualizer(visualizer, "check", folder)
        defaults = with_defaults(cfg.get("default_hooks") or {}, by_epoch=True)
        for name, hook in defaults.items():  # the run below does not build the hooks that save checkpoints
            with default_scope(scope), add_config_path({}, f"default_hooks.{name}"):
                HookList().register(hook)
        cfg.update(work_dir=folder, launcher="none", log_level="WARNING", resume=False, visualizer=None)
        cfg.update(fast_dev_run=1, limit_train_batches=None, limit_val_batches=None, overfit_batches=None)
        cfg.default_hooks = {**(cfg.get("default_hooks") or {}), "report": None}
        runner = Runner.from_cfg(cfg)
        runner.register_hook(found)
        runner.train()
        results = {"train": {**_samples(runner.train_dataloader), "checked_batches": 1, **found.loss}}
        if runner.val_loop is not None:
            results["val"] = {**_samples(runner.val_dataloader), "checked_batches": 1, **found.metrics}
    return results


def _samples(loader: Any) -> Mapping[str, Any]:
    """Return the number of samples, if known."""
    dataset: Any = getattr(loader, "dataset", None)
    return {"samples": len(dataset)} if hasattr(dataset, "__len__") else {}
