"""MMEngine's Runner: Slipstream's Runner with MMEngine's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmengine.runner.amp import autocast
from mmengine.runner.checkpoint import (
    CheckpointLoader,
    find_latest_checkpoint,
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_state_dict,
    get_torchvision_models,
    load_checkpoint,
    load_state_dict,
    save_checkpoint,
    weights_to_cpu,
)
from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.hooks import Hook, Priority, get_priority
from slipstream.openmmlab.config import own_config
from slipstream.openmmlab.operators import compute_bf16_operators_in_float32
from slipstream.openmmlab.registry import RUNNERS
from slipstream.openmmlab.speed import merge_environment
from slipstream.registry import default_scope
from slipstream.registry.registry import ROOT_SCOPE, current_scope
from slipstream.runner import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    LogProcessor,
    TestLoop,
    ValLoop,
    set_random_seed,
)
from slipstream.runner import Runner as OwnRunner

__all__ = [
    "BaseLoop", "CheckpointLoader", "EpochBasedTrainLoop", "IterBasedTrainLoop", "LogProcessor", "Priority",
    "Runner", "TestLoop", "ValLoop", "autocast", "find_latest_checkpoint", "get_deprecated_model_names",
    "get_external_models", "get_mmcls_models", "get_priority", "get_state_dict", "get_torchvision_models",
    "load_checkpoint", "load_state_dict", "save_checkpoint", "set_random_seed",
    "turn_on_activation_checkpointing", "weights_to_cpu",
]  # fmt: skip


@RUNNERS.register_module()
class Runner(OwnRunner):
    """Slipstream's Runner with MMEngine's defaults.

    Batches are lists of samples (`pseudo_collate`), and names without a scope refer to MMEngine's registries. The
    logger and the message hub of the most recently created Runner are the current instances, even before and after a
    run. The speed options in the SLIPSTREAM_SPEED environment variable take precedence over those in the configuration.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "cfg": own_config(kwargs.get("cfg"))})

    __init__.__wrapped__ = OwnRunner.__init__  # type: ignore[attr-defined]  # the signature

    @classmethod
    def from_cfg(cls, cfg: Any) -> OwnRunner:
        """Build a Runner from a configuration. Names imported by a pure Python style configuration are ignored."""
        return super().from_cfg(own_config(cfg))

    def load_or_resume(self) -> None:
        """Resume from the checkpoint found at construction, or load `load_from`. Later calls have no effect.

        As in MMEngine, a call before `train` resumes the complete state if the configuration includes training.
        """
        source = self.checkpoints.resume_from
        has_training = self._training["optim_wrapper"] is not None
        if source is not None and has_training and self.optim_wrapper is None and not self._context.active:
            self.resume(source)
        else:
            super().load_or_resume()

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader[Any] | Mapping[str, Any], seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader[Any]:
        """Build a data loader from its configuration.

        Args:
            dataloader: the configuration, or an existing data loader.
            seed: seed for shuffling and augmentation (default: 0).
            diff_rank_seed: ignored, because each sample has its own seed.
        """
        with default_scope(current_scope() or "mmengine"):
            return build_dataloader(_with_collate(dataloader), seed or 0, "dataloader", training=False)

    def _init_parts(self, arguments: dict[str, Any]) -> None:
        speed = arguments["speed"]
        arguments["speed"] = merge_environment(self.cfg.get("speed") if speed is None else speed)
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            arguments[name] = _with_collate(arguments[name])
        if self._context.scope in (None, ROOT_SCOPE):
            self._context.scope = "mmengine"
        with default_scope(self._context.scope):
            super()._init_parts(arguments)
        compute_bf16_operators_in_float32()
        self.register_hook(ConvertSchedulerStates())

    def _open_logs(self, *arguments: Any) -> None:
        super()._open_logs(*arguments)
        # As in MMEngine, models and hooks may use the current instances in their constructors.
        self.logger.make_current()
        self.message_hub.make_current()


def _with_collate(loader: Any) -> Any:
    """Return the configuration of a data loader with MMEngine's default for `collate_fn`."""
    if isinstance(loader, Mapping) and "dataset" in loader and loader.get("collate_fn") is None:
        return {**loader, "collate_fn": {"type": "pseudo_collate"}}
    if isinstance(loader, Mapping) and "dataset" not in loader:  # several loaders
        return {name: _with_collate(part) for name, part in loader.items()}
    return loader


class ConvertSchedulerStates(Hook):
    """Remove the values of MMEngine's extra parameter group from resumed scheduler states.

    If the optimizer has several groups, MMEngine's optimizer wrapper adds a group without model parameters, in which it
    stores the base learning rate.
    """

    priority = "VERY_HIGH"

    def after_load_checkpoint(self, runner: OwnRunner, checkpoint: dict[str, Any]) -> None:
        """Convert the states in place."""
        if runner.param_schedulers and runner.checkpoints.resuming:
            _convert(runner.param_schedulers, checkpoint.get("param_schedulers"))


def _convert(schedulers: Any, states: Any) -> None:
    if isinstance(schedulers, dict) and isinstance(states, Mapping):
        for name, part in schedulers.items():
            _convert(part, states.get(name))
    elif isinstance(schedulers, list) and isinstance(states, list):
        for scheduler, state in zip(schedulers, states, strict=False):
            count = len(getattr(scheduler, "base_values", ()))
            for key in ("base_values", "_last_value"):
                values = state.get(key) if isinstance(state, dict) else None
                if isinstance(values, list) and len(values) == count + 1:
                    state[key] = values[:count]
