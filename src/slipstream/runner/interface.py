"""How a Runner calls its model: through the methods of a `BaseModel`, or as a plain module with a loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from slipstream.errors import ConfigError, LossError, ModelError
from slipstream.model import unwrap_model
from slipstream.model.base_model import run_forward
from slipstream.model.data_preprocessor import BaseDataPreprocessor
from slipstream.registry import MODELS
from slipstream.speed.apply import to_device
from slipstream.speed.steps import ModelLosses
from slipstream.train_step import LossFunction, outputs_and_targets, read_losses

# The Runner's `loss_fn` argument.
LossArgument = LossFunction | Mapping[str, Any] | Literal["model"] | None


class ModelInterface:
    """Calls a model through the methods of `BaseModel`.

    Args:
        model: the model, wrapped if there are several processes.
    """

    # Whether the model's `init_weights` method is called before training.
    initializes_weights = True

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def core(self) -> Any:
        """The model, unwrapped."""
        return unwrap_model(self.model)

    @property
    def preprocessor(self) -> Any:
        """The data preprocessor, or None if the model has none."""
        return getattr(self.core, "data_preprocessor", None)

    @property
    def losses(self) -> ModelLosses:
        """A function that returns the loss to minimize and the values to log, given the model (wrapped or not) and a
        prepared batch.

        Raises:
            ConfigError: the model defines only a training step.
        """
        if not hasattr(self.core, "parse_losses"):
            raise ConfigError(
                f"'loss' requires a BaseModel or loss_fn, but {type(self.core).__name__} defines only train_step; use "
                "metrics instead",
                "val_evaluator",
            )
        return partial(_parsed_losses, self.core.parse_losses)

    @property
    def loss_step(self) -> Callable[[Any], Any] | None:
        """The model's `loss_step`, which returns the losses of a batch from the loader; None if it is not defined."""
        return getattr(self.core, "loss_step", None)

    def prepare(self, training: bool) -> Callable[[Any], Any]:
        """Return a function that moves a batch from the loader to the device, and preprocesses it."""
        return lambda batch: self.core.data_preprocessor(batch, training)

    def predict(self, batch: Any, mode: str) -> Any:
        """Return the predictions for a batch from the loader; `mode` is `val` or `test`."""
        method = getattr(self.model, f"{mode}_step", None) or getattr(self.core, f"{mode}_step")
        return method(batch)

    def evaluate_losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of a batch from the loader, with the model in its current mode."""
        return self.losses(self.core, self.prepare(False)(batch))[1]

    def predict_with_losses(self, batch: Any, mode: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the results of `predict` and `evaluate_losses` for a batch from the loader."""
        unchanged = tree_map_only(Tensor, torch.clone, batch)  # the model may change its inputs in place
        return self.predict(batch, mode), self.evaluate_losses(unchanged)


class PlainModel(ModelInterface):
    """Calls a module that does not have the methods of `BaseModel`.

    During evaluation, the predictions are pairs `(outputs, targets)`, or `(outputs, batch)` if the batch is a dict.

    Args:
        model: the model, wrapped if there are several processes.
        loss_fn: `loss_fn(outputs, targets)`; None if the model returns its loss.
        preprocessor: moves a batch to the device; None for a `BaseDataPreprocessor`.
        device: the device of the model.
    """

    initializes_weights = False  # another library's `init_weights` method may discard pretrained weights

    def __init__(
        self, model: Any, loss_fn: LossFunction | None, preprocessor: nn.Module | None, device: torch.device
    ) -> None:
        super().__init__(model)
        self._losses, self._returns_loss = read_losses(loss_fn, None), loss_fn is None
        self._trains_for_losses = False  # whether the model returns losses only in training mode
        self._preprocessor = (preprocessor or BaseDataPreprocessor()).to(device)

    @property
    def preprocessor(self) -> nn.Module:
        """The data preprocessor."""
        return self._preprocessor

    @property
    def loss_step(self) -> Callable[[Any], Any]:
        """The function that returns the losses of a batch from the loader."""
        return lambda batch: self._losses(self.core, self.prepare(True)(batch))

    @property
    def losses(self) -> ModelLosses:
        """A function that returns the loss to minimize and the values to log, given the model and a batch."""
        return self._losses

    def prepare(self, training: bool) -> Callable[[Any], Any]:
        """Return a function that moves a batch from the loader to the device, and preprocesses it."""
        if type(self._preprocessor) is BaseDataPreprocessor:
            return self._preprocessor.cast_data
        return lambda batch: self._preprocessor(batch, training)

    def predict(self, batch: Any, mode: str) -> Any:
        """Return (outputs, targets) for a batch from the loader, or (outputs, batch) if the batch is a dict."""
        try:
            return outputs_and_targets(self.core, self.prepare(False)(batch))
        except TypeError as error:
            if not self._returns_loss or "required positional argument" not in str(error):
                raise
            raise ModelError(
                f"to predict, {type(self.core).__name__} is called without the targets, the last element of the batch "
                f"({error}); give this argument of forward the default None and return the outputs without it, or set "
                "val_evaluator='loss'"
            ) from error

    def predict_with_losses(self, batch: Any, mode: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the predictions and the losses of a batch; a loss function uses the outputs in the predictions."""
        if self._returns_loss:
            return super().predict_with_losses(batch, mode)
        outputs, targets = predictions = self.predict(batch, mode)
        known: Any = lambda *args, **kwargs: outputs  # noqa: E731
        batch = targets if isinstance(targets, Mapping) else (None, targets)
        return predictions, self.losses(known, batch)[1]

    def evaluate_losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of a batch from the loader.

        If the model returns no losses in evaluation mode, its layers and torch's functions stay in this mode.
        """
        if not self._trains_for_losses:
            try:
                return super().evaluate_losses(batch)
            except LossError:
                self._trains_for_losses = True
        with _training_containers(self.core), _EvaluatedFunctions():
            return super().evaluate_losses(batch)


@contextmanager
def _training_containers(model: nn.Module) -> Iterator[None]:
    """Put the modules that contain others into training mode, in which torchvision's detectors return losses.

    Layers, such as BatchNorm and dropout, and the modules of torch stay in their current mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        if next(module.children(), None) is not None and not type(module).__module__.startswith("torch.nn."):
            module.training = True
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _EvaluatedFunctions(TorchFunctionMode):
    """Call functions such as `F.dropout(x, training=self.training)` as in evaluation mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # BatchNorm without running statistics (None) uses those of the batch in both modes.
        if "training" in kwargs and not any(value is None for value in args):
            kwargs["training"] = False
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _parsed_losses(parse_losses: Callable[[Any], Any], module: nn.Module, inputs: Any) -> Any:
    return parse_losses(run_forward(module, inputs, mode="loss"))


def build_interface(
    model: nn.Module, loss_fn: LossArgument, preprocessor: Any, device: torch.device
) -> ModelInterface:
    """Return the interface of the Runner's model, which `build_model` has validated.

    Args:
        model: the model, wrapped if there are several processes.
        loss_fn: a function or its configuration; `'model'` for a model that returns its loss, None for a `BaseModel`.
        preprocessor: the Runner's `data_preprocessor` argument.
        device: the device of the model.

    Raises:
        ConfigError: `loss_fn` is not a function, or has trainable parameters.
    """
    if loss_fn is None:
        return ModelInterface(model)
    loss: Any = MODELS.build(loss_fn) if isinstance(loss_fn, Mapping) else loss_fn
    if isinstance(preprocessor, Mapping):
        preprocessor = MODELS.build(preprocessor)
    if isinstance(loss, nn.Module):
        if any(param.requires_grad for param in loss.parameters()):
            raise ConfigError(
                "has trainable parameters, which would be neither trained nor saved; make the loss part of the "
                "model, and set loss_fn='model'",
                "loss_fn",
            )
        to_device(loss, device)
    if isinstance(loss, str) and loss != "model":
        raise ConfigError(f"must be a function, a dict with a 'type', or 'model', not {loss!r}", "loss_fn")
    return PlainModel(model, None if isinstance(loss, str) else loss, preprocessor, device)
