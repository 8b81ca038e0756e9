"""`slipstream check`: validate a recipe, and run one training batch and one validation batch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from slipstream.cli.child import interrupt_on_sigterm
from slipstream.cli.configure import configure
from slipstream.errors import NonFiniteLossError
from slipstream.hooks import CheckpointHook, Hook, HookList, MonitorCheckHook
from slipstream.registry import default_scope
from slipstream.runner.logs import build_visualizer
from slipstream.runner.user_config import add_config_path, with_defaults
from slipstream.tune.measured_config import hook_class, keep_training_only, writes_files

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.runner import Runner

__all__ = ["run"]

_VALIDATION = ("val_dataloader", "val_cfg", "val_evaluator")
_IN_PROCESS = {
    "num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": None,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the results of the checks. This command writes files only to a temporary folder.

    Raises:
        SlipstreamError: the recipe is invalid, or a batch fails.
    """
    with redirect_stdout(sys.stderr):  # keep log lines out of the JSON output
        results = _check(configure(args))
    if args.json:
        print(json.dumps(_strict(results), indent=1, allow_nan=False))
        return 0
    for part, values in results.items():
        text = ", ".join(f"{name} {_format(value)}" for name, value in values.items())
        print(f"{part}: {text}")
    print(f"{args.config} is valid")
    return 0


class _Finished(Exception):  # noqa: N818 (not an error)
    """Raised to end training after the first step."""


class _OneStep(Hook):
    """Record the loss of the first step, and end training."""

    priority = "VERY_LOW"
    loss: float | None = None
    """The loss, or None if the step returns no loss."""

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        loss = (outputs or {}).get("loss")
        self.loss = None if loss is None else float(loss)
        raise _Finished


def _check(cfg: Config) -> Mapping[str, Mapping[str, Any]]:
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths

    validation = {name: cfg.get(name) for name in _VALIDATION}
    hook = _OneStep()
    with (
        interrupt_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="slipstream-") as folder,
        at_user_paths(cfg),
    ):
        visualizer = cfg.get("visualizer")
        checks = _replace_saving_hooks(cfg)
        keep_training_only(cfg, folder)
        cfg.update(validation)
        cfg.default_hooks = {**cfg.default_hooks, **checks}
        cfg.launcher, cfg.log_level = "none", "WARNING"
        for name, limit in (("train_dataloader", {}), ("val_dataloader", {"num_batch_per_epoch": 1})):
            if isinstance(loader := cfg.get(name), Mapping):
                cfg[name] = {**loader, **_in_process(loader), **limit}
        if isinstance(visualizer, Mapping):
            with default_scope(cfg.get("default_scope", "slipstream")):
                build_visualizer(visualizer, "check", folder)
        runner = Runner.from_cfg(cfg)
        runner.register_hook(hook)
        with suppress(_Finished):
            runner.train()
        loader = runner.train_dataloader
        results: dict[str, dict[str, Any]] = {
            "train": {**_sizes(loader), "checked_batches": 1, **_finite_loss(hook.loss)}
        }
        if cfg.get("val_cfg") is not None:
            metrics = runner.val()
            results["val"] = {
                **_sizes(runner.val_dataloader),
                **({"checked_batches": 1} if isinstance(cfg.get("val_dataloader"), Mapping) else {}),
                **{key: float(value) for key, value in metrics.items()},
            }
    return results


def _replace_saving_hooks(cfg: Config) -> dict[str, Any]:
    """Check the hooks that write files, and replace the CheckpointHooks by checks of their metrics.

    Returns:
        The checks that replace default hooks, by name.

    Raises:
        ConfigError: an argument of a hook is invalid.
    """
    defaults, custom = cfg.get("default_hooks") or {}, cfg.get("custom_hooks") or ()
    hooks = {f"default_hooks.{name}": hook for name, hook in with_defaults(defaults, by_epoch=True).items()}
    hooks |= {f"custom_hooks[{index}]": hook for index, hook in enumerate(custom)}
    with default_scope(cfg.get("default_scope", "slipstream")):
        for path, hook in hooks.items():
            if isinstance(hook, Mapping) and "type" in hook and writes_files(hook):
                with add_config_path({}, path):
                    HookList().register(hook)
        replaced = [
            MonitorCheckHook.config_for(hook) if _saves_checkpoints(hook) else hook for hook in custom
        ]
        cfg.custom_hooks = [hook for hook in replaced if hook is not None]
        return {
            name: MonitorCheckHook.config_for(hook)
            for name, hook in defaults.items()
            if name == "checkpoint" or _saves_checkpoints(hook)
        }


def _saves_checkpoints(hook: Any) -> bool:
    kind = hook_class(hook) if hook is not None else None
    return isinstance(kind, type) and issubclass(kind, CheckpointHook)


def _finite_loss(loss: float | None) -> Mapping[str, float]:
    """Return a dict that contains the loss, or an empty dict if the step returns no loss.

    Raises:
        NonFiniteLossError: the loss is NaN or infinite.
    """
    if loss is None:
        return {}
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss of the first training batch is {loss}; check the data for NaN or wrong labels, check the "
            "initial weights, or use bf16 instead of fp16",
            1,
        )
    return {"loss": loss}


def _in_process(loader: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return data loader options that load the same batches in this process, without workers."""
    return {key: value for key, value in _IN_PROCESS.items() if key in loader}


def _sizes(loader: Any) -> Mapping[str, Any]:
    """Return the number of samples, if known."""
    try:
        return {"samples": len(loader.dataset)}
    except (AttributeError, TypeError):
        return {}


def _strict(results: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Return the values, with None in place of NaN and infinity, which JSON cannot represent."""
    return {
        part: {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        for part, values in results.items()
    }


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
