"""What a model looks like to the Runner: MMEngine's `BaseModel`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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

__all__ = ["BaseModel", "run_forward"]


class BaseModel(BaseModule):
    """A model that can train, validate and test itself on batches.

    Subclasses define `forward(*batch, mode)` or `forward(**batch, mode)`, whichever the data loader's
    batches are: mode `"loss"` returns a dict of scalar losses, `"predict"` returns predictions for the
    metrics, `"tensor"` the network's raw output.

    Args:
        data_preprocessor: a module (or its configuration) that brings a batch to the device; by default
            `BaseDataPreprocessor`, which only moves it.
        init_cfg: how `init_weights` initialises the weights.
    """

    def __init__(
        self,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(init_cfg)
        if isinstance(data_preprocessor, nn.Module):
            self.data_preprocessor = data_preprocessor
        else:
            default = {"type": BaseDataPreprocessor}
            self.data_preprocessor = MODELS.build(data_preprocessor or {}, default_args=default)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Train on one batch and return 0-dim device tensors to log; override it for other schemes (GANs)."""
        return EagerStep(self.loss_step, self, optim_wrapper, self.parse_losses)(data)

    def loss_step(self, data: Any) -> dict[str, Tensor]:
        """Return the losses of a batch as the data loader gives it."""
        losses: dict[str, Tensor] = run_forward(self, self.data_preprocessor(data, True), "loss")
        return losses

    @torch.no_grad()
    def val_step(self, data: Any) -> Any:
        """Return the predictions for a batch as the data loader gives it."""
        return run_forward(self, self.data_preprocessor(data, False), "predict")

    def test_step(self, data: Any) -> Any:
        """Return the predictions for a batch; the same as `val_step` unless overridden."""
        return self.val_step(data)

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses and the values to log."""
        return sum_losses(losses)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Compute losses, predictions or raw output, as `mode` says."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(..., mode)")


def run_forward(module: nn.Module, data: Any, mode: str) -> Any:
    """Call `module` with a preprocessed batch: a dict by keywords, a tuple or list by position.

    Raises:
        DataError: the batch is neither, or its parts are not what `forward` takes.
    """
    if not isinstance(data, Mapping | list | tuple):
        raise DataError(f"a batch must be a dict, list or tuple, not {type(data).__name__}: check collate_fn")
    args, kwargs = ((), data) if isinstance(data, Mapping) else (data, {})
    try:
        return module(*args, **kwargs, mode=mode)
    except TypeError as error:
        _explain(module, args, kwargs, error)
        raise


def _explain(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise a clearer error if the parts of the batch do not fit the signature of `forward`."""
    inner: nn.Module = getattr(module, "module", module)
    signature = inspect.signature(inner.forward)
    try:
        signature.bind(*args, **kwargs, mode="loss")
    except TypeError:
        wants = [name for name in signature.parameters if name != "mode"]
        has = f"the keys {sorted(kwargs)}" if kwargs else f"{len(args)} parts"
        raise DataError(
            f"the batch has {has}, but {type(inner).__name__}.forward takes {wants} (and mode): "
            "change what the data set returns, or the arguments of forward"
        ) from error
