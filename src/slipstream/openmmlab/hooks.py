"""MMEngine's hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.hooks import *  # noqa: F403
from slipstream.hooks import Hook
from slipstream.openmmlab.registry import HOOKS, MODELS, RUNNERS

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class PrepareTTAHook(Hook):
    """Before the first test, replace the Runner's model with a `BaseTTAModel` that wraps it.

    Args:
        tta_cfg: configuration of the `BaseTTAModel`, without the `module` argument.
    """

    def __init__(self, tta_cfg: Mapping[str, Any]) -> None:
        self.tta_cfg = dict(tta_cfg)
        self._wrapper: Any = None

    def before_test(self, runner: Runner) -> None:
        """Replace the model."""
        if runner.model is not self._wrapper:
            self._wrapper = MODELS.build({**self.tta_cfg, "module": runner.model})
            runner.model = self._wrapper


def build_runner_with_tta(cfg: Any) -> Runner:
    """Build a Runner that tests with the `tta_pipeline` and `tta_model` from the configuration.

    Args:
        cfg: the configuration; the pipeline of the test dataset is replaced in place.

    Raises:
        ConfigError: if `tta_model` or `tta_pipeline` is missing.
    """
    for key in ("tta_model", "tta_pipeline"):
        if cfg.get(key) is None:
            raise ConfigError("is required for test-time augmentation; add it to the configuration", key)
    cfg["test_dataloader"]["dataset"]["pipeline"] = cfg["tta_pipeline"]
    runner: Runner = RUNNERS.build(cfg)
    runner.register_hook(PrepareTTAHook(cfg["tta_model"]))
    return runner
