"""A model for the Runner that combines a network, its loss and its training metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.evaluator import CountingMetric
from slipstream.hooks import Hook
from slipstream.losses import Outputs
from slipstream.model import Segmentor, unwrap_model
from slipstream.model.tasks import SlidingWindow, main_output, slide
from slipstream.model.weight_init import PretrainedWeights, load_pretrained
from slipstream.optim.scheduler import all_schedulers
from slipstream.registry import HOOKS, METRICS, MODELS
from slipstream.training.losses import LOSSES_KEY, loss_value
from slipstream.training.optimizers import freeze
from slipstream.training.schedules import TrainPlateauLR
from slipstream.zoo import models
from slipstream.zoo.dice_ce_edge import DiceCEEdgeLoss
from slipstream.zoo.losses import CrossEntropy, MultiHeadCrossEntropy
from slipstream.zoo.shelfnet_loss import ShelfNetOHEMLoss
from slipstream.zoo.stdc_loss import STDCLoss

if TYPE_CHECKING:
    from slipstream.runner import Runner

ModuleOrConfig = nn.Module | Mapping[str, Any]

# Losses that compare class scores with class ids or class probabilities.
CLASS_LOSSES = (
    nn.CrossEntropyLoss, CrossEntropy, MultiHeadCrossEntropy, DiceCEEdgeLoss, STDCLoss, ShelfNetOHEMLoss,
)  # fmt: skip


@MODELS.register_module()
class SupervisedModel(Segmentor, PretrainedWeights):
    """A network for supervised classification of images or pixels.

    Batches are dicts with `inputs` and `targets`, or tuples (inputs, targets, ...). Additional tuple items are ignored.

    Args:
        network: a module or its configuration. It returns logits (N, classes) or (N, classes, H, W). In training,
            it may return a tuple of the logits and auxiliary outputs.
        loss: `loss(outputs, targets)`, given as a module, its configuration or a function. It returns a scalar, a dict
            of scalars, or SuperGradients' pair (scalar, values to log). Default: cross-entropy.
        data_preprocessor: by default, moves batches to the device and applies the device transforms.
        pretrained: arguments that `init_weights` passes to `zoo.models.load` to load weights, except in a resumed run.
        train_metrics: `CountingMetric`s or their configurations, updated during training. `TrainMetricsHook` reads
            them.
        num_classes: number of classes in the dataset. The main output must have the same number of channels.
        paramwise_cfg: as for `PrefixOptimWrapperConstructor`. Parameters with a learning rate of 0 are frozen.
        watched_losses: names of losses to return with the predictions, for `ValidationLoss`.

    Raises:
        ConfigError: if a training metric cannot accumulate its counts on the device, or `paramwise_cfg` does not
            match the network.
        ModelError: in forward, if the number of output channels is not `num_classes`.
        DataError: in forward with a classification loss, if the targets do not match the output or are out of range.
    """

    sliding_window: SlidingWindow | None = None
    """If set, evaluation images are processed in sliding windows."""

    def __init__(
        self,
        network: ModuleOrConfig,
        loss: Any = None,
        data_preprocessor: Any = None,
        pretrained: Mapping[str, Any] | None = None,
        train_metrics: Sequence[Any] | None = None,
        num_classes: int | None = None,
        paramwise_cfg: Mapping[str, Any] | None = None,
        watched_losses: Sequence[str] = (),
    ) -> None:
        super().__init__(network, loss, data_preprocessor)
        self.watched_losses = tuple(watched_losses)
        if paramwise_cfg is not None:
            freeze(self, paramwise_cfg)
        self.pretrained = dict(pretrained or {})
        self.pretrained_pending = self.pretrained.get("checkpoint_path") is not None
        self.num_classes = num_classes
        self.train_metrics = [_build_metric(metric, i) for i, metric in enumerate(train_metrics or ())]
        for index, metric in enumerate(self.train_metrics):
            counts = torch.zeros(metric.num_counts(), dtype=torch.int64)
            # Counts are buffers, so that a compiled step can update them in place. Checkpoints do not contain them.
            self.register_buffer(f"train_counts{index}", counts, persistent=False)

    def init_weights(self) -> None:
        """Initialize the weights and load `pretrained`. Later calls have no effect."""
        if self.is_init:
            return
        super().init_weights()
        load_pretrained(self)

    def _load_pretrained(self) -> None:
        models.load(self.network, **self.pretrained)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, *others: Any, mode: str = "tensor"
    ) -> Any:
        """Return the losses, a dict with `preds` and `targets`, or the network's output.

        Args:
            inputs: images (N, C, H, W), of a float dtype or uint8; uint8 pixels are converted to floats from 0 to
                255.
            targets: class ids (N,) or (N, H, W) of any integer dtype, or class probabilities (N, classes).
            others: additional batch items; ignored.
            mode: `loss`, `predict` or `tensor`. Predictions are class ids (N, H, W), int64, or logits (N, classes).
        """
        if inputs.dtype == torch.uint8:  # the dataset has no normalizing transform
            inputs = inputs.float()
        if self.sliding_window is not None and mode == "predict" and not self.training:
            outputs: Any = slide(self.network, inputs, self.sliding_window)
        else:
            outputs = self.outputs(inputs, mode)
        self.check_classes(main_output(outputs))
        if mode == "loss":
            has_classes = targets is not None and isinstance(self.loss, CLASS_LOSSES)
            if has_classes and targets is not None:
                _check_targets(main_output(outputs), targets)
            if self.training and targets is not None:  # not in evaluation, which also computes the loss
                self._count(outputs, inputs, targets)
            loss_input = self.loss_inputs(outputs, inputs, targets)
            if has_classes and targets is not None and main_output(outputs).ndim == 4:
                _check_size(main_output(loss_input), targets)
            return self.losses(loss_input, targets)
        if mode != "predict":
            return outputs
        predictions: dict[str, Any] = self.predictions(outputs, inputs, targets)
        if self.watched_losses and targets is not None:
            result = super().losses(self.loss_inputs(outputs, inputs, targets), targets)
            raw = result["loss"] if result.keys() == {"loss"} else result
            predictions[LOSSES_KEY] = {name: loss_value(self.loss, raw, name) for name in self.watched_losses}
        return predictions

    def loss_inputs(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> Any:
        """Return the loss's first argument: the network's outputs, without the image padding."""
        is_dense = main_output(outputs).ndim == 4
        return self.without_padding(outputs, inputs, targets) if is_dense else outputs

    def losses(self, outputs: Any, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the losses by name. If the loss returns SuperGradients' pair, only the first item is a loss."""
        losses: dict[str, Any] = super().losses(outputs, targets)
        pair = losses.get("loss")
        return {"loss": pair[0]} if isinstance(pair, tuple) else losses

    def predictions(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the predictions (class ids for pixels, logits for images) and the targets, if any, as class ids."""
        scores = main_output(outputs)
        if scores.ndim == 4:
            return super().predictions(outputs, inputs, targets)
        if targets is None:
            return {"preds": scores}
        are_probabilities = targets.shape == scores.shape
        return {"preds": scores, "targets": targets.argmax(1) if are_probabilities else targets}

    def read_train_metrics(self) -> dict[str, Any]:
        """Return a dict of the metrics over all ranks, and reset the counts. This synchronizes with the device."""
        values: dict[str, Any] = {}
        for metric, counts in self._metrics_and_counts():
            values.update(metric.evaluate_counts(counts))
            counts.zero_()
        return values

    @torch.no_grad()
    def _count(self, outputs: Any, inputs: Tensor, targets: Tensor) -> None:
        if not self.train_metrics:
            return
        predictions = self.predictions(outputs, inputs, targets)
        for metric, counts in self._metrics_and_counts():
            key = "scores" if metric.uses_scores and "scores" in predictions else "preds"
            metric.count(counts, predictions[key].detach(), predictions["targets"])

    def _metrics_and_counts(self) -> list[tuple[CountingMetric, Tensor]]:
        return [(metric, getattr(self, f"train_counts{i}")) for i, metric in enumerate(self.train_metrics)]


def _check_targets(scores: Outputs, targets: Tensor) -> None:
    """Raise `DataError` unless the targets are class ids or class probabilities, without a device synchronization."""
    is_float = targets.is_floating_point()
    if targets.shape == scores.shape if is_float else targets.ndim == scores.ndim - 1:
        return
    raise DataError(
        f"the targets, a {targets.dtype} tensor of shape {tuple(targets.shape)}, do not match the network's output "
        f"of shape {tuple(scores.shape)}: they must be class ids {'(N,)' if scores.ndim == 2 else '(N, H, W)'} of an "
        "integer dtype (use .long() and squeeze(1)), or probabilities with the shape of the output"
    )


def _check_size(scores: Outputs, targets: Tensor) -> None:
    """Raise `DataError` unless targets and output have the same N, H and W, without a device synchronization."""
    if (scores.shape[0], *scores.shape[-2:]) != (len(targets), *targets.shape[-2:]):
        raise DataError(
            f"targets of shape {tuple(targets.shape)} and the network's output of shape {tuple(scores.shape)} differ "
            "in size; check the dataset's transforms"
        )


def _build_metric(metric: CountingMetric | Mapping[str, Any], index: int) -> CountingMetric:
    built: Any = METRICS.build(metric) if isinstance(metric, Mapping) else metric
    if not isinstance(built, CountingMetric):
        raise ConfigError(
            "must be a metric that counts on the device, such as IoU", f"train_metrics[{index}]"
        )
    return built


@HOOKS.register_module()
class TrainMetricsHook(Hook):
    """Log the training metrics of a `SupervisedModel` after each epoch, under names such as `train/IoU`.

    Each `TrainPlateauLR` receives the values. The message hub also stores them; read them with its
    `get_info` method. If training resumes within an epoch, only the remaining batches are counted.
    """

    priority = "ABOVE_NORMAL"

    def before_train(self, runner: Runner) -> None:
        """Pass the dataset's meta information to the metrics.

        Raises:
            ModelError: if the model has no training metrics.
        """
        self._model: Any = unwrap_model(runner.model)
        if not (metrics := getattr(self._model, "train_metrics", None)):
            raise ModelError("TrainMetricsHook requires a SupervisedModel with train_metrics")
        for metric in metrics:
            metric.dataset_meta = getattr(runner.train_dataloader.dataset, "metainfo", None) or {}

    def after_train_epoch(self, runner: Runner) -> None:
        """Read, log and reset the metrics."""
        values = {f"train/{name}": value for name, value in self._model.read_train_metrics().items()}
        # Do not store them as scalars in the hub, because the next epoch's log lines and plots would include them.
        runner.message_hub.update_info_dict(values)
        for scheduler in all_schedulers(runner.param_schedulers):
            if isinstance(scheduler, TrainPlateauLR):
                scheduler.evaluate(values)
        text = "  ".join(f"{name}: {value:.4f}" for name, value in values.items())
        runner.logger.info(f"Epoch(train) [{runner.epoch + 1}]  {text}")
        runner.visualizer.add_scalars(values, step=runner.epoch + 1, file_path=runner.json_log)
