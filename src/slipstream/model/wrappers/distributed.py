"""Data parallelism: DDP by MMEngine's names, and any user's subclass of torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slipstream.errors import ModelError
from slipstream.model.base_model import BaseModel, run_forward
from slipstream.registry import MODEL_WRAPPERS
from slipstream.step import EagerStep

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper, OptimWrapperDict

__all__ = [
    "MMDistributedDataParallel",
    "MMSeparateDistributedDataParallel",
    "is_model_wrapper",
    "unwrap_model",
]

MODEL_WRAPPERS.register_module(module=DistributedDataParallel)


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(DistributedDataParallel):
    """torch's `DistributedDataParallel` with a `train_step`, `val_step` and `test_step`.

    `broadcast_buffers` is False unless asked for, whichever other options are given: BatchNorm statistics
    then stay each rank's own (`SyncBuffersHook` averages them, SyncBN makes them equal).
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # Its successor still syncs buffers once, at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, broadcast_buffers=broadcast_buffers, **kwargs)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log."""

        def forward(batch: Any) -> Any:
            return run_forward(self, self.module.data_preprocessor(batch, True), "loss")

        return EagerStep(forward, self, optim_wrapper, self.module.parse_losses)(data)

    def val_step(self, data: Any) -> Any:
        """Return the wrapped model's predictions."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Return the wrapped model's predictions."""
        return self.module.test_step(data)


@MODEL_WRAPPERS.register_module()
class MMSeparateDistributedDataParallel(BaseModel):
    """Wrap each trainable child by itself, for models that train parts in turn (GANs).

    The model overrides `train_step(data, optim_wrapper)` and calls its children there.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any) -> None:
        super().__init__(getattr(module, "data_preprocessor", None))
        self.module: Any = module
        for name, child in module.named_children():
            if name != "data_preprocessor" and any(p.requires_grad for p in child.parameters()):
                wrapped = MMDistributedDataParallel(child, broadcast_buffers=broadcast_buffers, **kwargs)
                wrapped.register_state_dict_post_hook(_without_wrapper)
                wrapped.register_load_state_dict_pre_hook(_with_wrapper)
                setattr(module, name, wrapped)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper | OptimWrapperDict) -> dict[str, Tensor]:
        """Run the model's own training step."""
        logs: dict[str, Tensor] = self.module.train_step(data, optim_wrapper)
        return logs

    def val_step(self, data: Any) -> Any:
        """Return the model's predictions."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Return the model's predictions."""
        return self.module.test_step(data)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold back the gradient sync of every child."""
        with ExitStack() as stack:
            for child in self.module.children():
                if isinstance(child, DistributedDataParallel):
                    stack.enter_context(child.no_sync())
            yield


def _without_wrapper(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name a child's tensors as if it were not wrapped, so that checkpoints fit one process too."""
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key.removeprefix(f"{prefix}module.")] = state.pop(key)


def _with_wrapper(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def is_model_wrapper(model: nn.Module) -> bool:
    """Say whether `model` only wraps another that it holds as `module`."""
    known = (DistributedDataParallel, DataParallel, MMSeparateDistributedDataParallel)
    return isinstance(model, known) or type(model) in MODEL_WRAPPERS.module_dict.values()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own model inside any wrappers."""
    while is_model_wrapper(model):
        if not isinstance(inner := getattr(model, "module", None), nn.Module):
            raise ModelError(f"the wrapper {type(model).__name__} does not hold its model as `.module`")
        model = inner
    return model


def device_ids(device: torch.device) -> list[int] | None:
    """Return what DDP wants as `device_ids`: the accelerator's index, or None for the CPU."""
    return None if device.type == "cpu" else [torch.accelerator.current_device_index()]
