"""MMEngine's `BaseModel`: the interface between a model and the Runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.errors import DataError
from slipstream.model.base_module import BaseModule
from slipstream.model.data_preprocessor import BaseDataPreprocessor
from slipstream.registry import MODELS
from slipstream.step import EagerStep, sum_losses

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper


class BaseModel(BaseModule):
    """Base class for models with training, validation and test steps.

    Subclasses define `forward(*batch, mode)` for batches that are tuples or lists, or `forward(**batch, mode)` for
    batches that are dicts. `forward` returns a dict of scalar losses in mode `"loss"`, predictions for the metrics in
    mode `"predict"`, and the network's output in mode `"tensor"`.

    Args:
        data_preprocessor: a module (or its configuration) that moves a batch to the device; `BaseDataPreprocessor`
            by default.
        init_cfg: configuration for weight initialization, applied by `init_weights`.
    """

    def __init__(
        self, data_preprocessor: nn.Module | Mapping[str, Any] | None = None, init_cfg: Any = None
    ) -> None:
        super().__init__(init_cfg)
        if isinstance(data_preprocessor, nn.Module):
            self.data_preprocessor = data_preprocessor
        else:
            default = {"type": BaseDataPreprocessor}
            self.data_preprocessor = MODELS.build(data_preprocessor or {}, default_args=default)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log. Override this for custom steps (as in GANs)."""
        return EagerStep(lambda batch: self.parse_losses(self.loss_step(batch)), self, optim_wrapper)(data)

    def loss_step(self, data: Any) -> dict[str, Tensor]:
        """Return the losses of a batch from the data loader."""
        return run_forward(self, self.data_preprocessor(data, True), "loss")

    @torch.no_grad()
    def val_step(self, data: Any) -> Any:
        """Return the predictions for a batch from the data loader."""
        return run_forward(self, self.data_preprocessor(data, False), "predict")

    def test_step(self, data: Any) -> Any:
        """Return the predictions for a batch; the default calls `val_step`."""
        return self.val_step(data)

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses and the values to log."""
        return sum_losses(losses)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # so that subclasses may declare any arguments
        """Return losses, predictions or the network's output, depending on `mode`."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(..., mode)")


def run_forward(module: nn.Module, data: Any, mode: str) -> Any:
    """Call `module` with a preprocessed batch.

    A dict is passed as keyword arguments; a tuple or list is passed as positional arguments.

    Raises:
        DataError: if the batch has a different type.
    """
    if not isinstance(data, Mapping | list | tuple):
        raise DataError(f"a batch must be a dict, list or tuple, not {type(data).__name__}; check collate_fn")
    args, kwargs = ((), data) if isinstance(data, Mapping) else (data, {})
    return module(*args, **kwargs, mode=mode)
