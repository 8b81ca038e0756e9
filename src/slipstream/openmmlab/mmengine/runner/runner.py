"""MMEngine's Runner: Slipstream's Runner with MMEngine's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.openmmlab.mmengine.registry import RUNNERS
from slipstream.openmmlab.speed import with_environment
from slipstream.registry import default_scope
from slipstream.registry.registry import ROOT_SCOPE
from slipstream.runner import Runner as OwnRunner
from slipstream.step.background import can_fork

__all__ = ["Runner"]

_BUDGET = "5m"
"""Default time limit of compilation. Graphs of OpenMMLab's losses and post-processing can take longer."""


@RUNNERS.register_module()
class Runner(OwnRunner):
    """Slipstream's Runner with MMEngine's defaults.

    Batches are lists of samples (`pseudo_collate`), names without a scope are those of MMEngine, and the logger and the
    message hub of the newest Runner are the current ones, also before and after a run. Compilation has a time limit,
    and the speed options of SLIPSTREAM_SPEED have priority over those of the configuration.
    """

    def _init_parts(self, arguments: dict[str, Any]) -> None:
        own = arguments["speed"]
        arguments["speed"] = with_environment(self.cfg.get("speed") if own is None else own)
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            loader = arguments[name]
            if isinstance(loader, Mapping) and "dataset" in loader and loader.get("collate_fn") is None:
                arguments[name] = {**loader, "collate_fn": {"type": "pseudo_collate"}}
        if self._context.scope in (None, ROOT_SCOPE):
            self._context.scope = "mmengine"
        with default_scope(self._context.scope):
            super()._init_parts(arguments)
        how = self.speed.compile
        if (
            how is not None
            and how.budget is None
            and how.backend == "inductor"
            and can_fork(self.device.type)
        ):
            self.speed = replace(self.speed, compile=replace(how, budget=_BUDGET))

    def _open_logs(self, arguments: dict[str, Any]) -> None:
        super()._open_logs(arguments)
        # As in MMEngine, models and hooks may use the current instances in their constructors.
        self.logger.keep_current()
        self.message_hub.keep_current()
