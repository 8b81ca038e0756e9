"""A network of any kind, with its loss and its metrics of training, as the Runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.apps.zoo import models
from slipstream.apps.zoo.dice_ce_edge import DiceCEEdgeLoss
from slipstream.apps.zoo.losses import CrossEntropy, MultiHeadCrossEntropy
from slipstream.apps.zoo.stdc_loss import STDCLoss
from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.evaluator import CountingMetric
from slipstream.hooks import Hook
from slipstream.model import Segmentor, unwrap_model
from slipstream.model.sliding import SlidingWindow, slide
from slipstream.model.tasks import main_output
from slipstream.registry import HOOKS, METRICS, MODELS
from slipstream.training.optimizers import freeze

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["SupervisedModel", "TrainMetricsHook"]

Configured = nn.Module | Mapping[str, Any]

_OF_CLASSES = (nn.CrossEntropyLoss, CrossEntropy, MultiHeadCrossEntropy, DiceCEEdgeLoss, STDCLoss)
"""The losses that are known to compare scores of classes with class ids or shares."""


@MODELS.register_module()
class SupervisedModel(Segmentor):
    """A network that learns from pairs of inputs and targets: classifies images, or their pixels.

    Batches are dicts with `inputs` and `targets`, or tuples (inputs, targets, ...) as SuperGradients' loaders give
    them; what follows is not looked at.

    Args:
        network: a module or its configuration. It returns logits (N, classes) or (N, classes, H, W); in training,
            auxiliary outputs may follow them in a tuple.
        loss: `loss(outputs, targets)`, a module, its configuration or a function, gives a scalar, a dict of scalars,
            or SuperGradients' pair (scalar, what to log). By default cross-entropy.
        data_preprocessor: by default one that brings batches to the device and finishes them there.
        pretrained: the arguments of `zoo.models.load`; `init_weights` loads the weights, so that a run that is
            resumed does not.
        train_metrics: `CountingMetric`s or their configurations, which count during training; `TrainMetricsHook`
            reads them.
        num_classes: classes of the data set; the main output must have as many channels.
        paramwise_cfg: of a `PrefixOptimWrapperConstructor`; what has the learning rate 0 in it is frozen.

    Raises:
        ConfigError: a metric of training does not count on the device; or `paramwise_cfg` does not fit the network.
        ModelError: in forward: the network has not as many classes as the data set.
        DataError: in forward, from a loss of classes: the targets do not fit the output, or hold a class too many.
    """

    sliding_window: SlidingWindow | None = None
    """If set, images of an evaluation pass the network window by window."""

    def __init__(
        self,
        network: Configured,
        loss: Any = None,
        data_preprocessor: Any = None,
        pretrained: Mapping[str, Any] | None = None,
        train_metrics: Sequence[Any] | None = None,
        num_classes: int | None = None,
        paramwise_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(network, loss, data_preprocessor)
        if paramwise_cfg is not None:
            freeze(self, paramwise_cfg)
        self.pretrained = dict(pretrained or {})
        self.num_classes = num_classes
        self.train_metrics = [_counting(metric, place) for place, metric in enumerate(train_metrics or ())]
        for place, metric in enumerate(self.train_metrics):
            counts = torch.zeros(metric.num_counts(), dtype=torch.int64)
            # A buffer, so that a compiled step changes it in place; no part of checkpoints.
            self.register_buffer(f"train_counts{place}", counts, persistent=False)

    def init_weights(self) -> None:
        """Initialise the weights, and load those of `pretrained`; once only."""
        if self.is_init:
            return
        super().init_weights()
        if self.pretrained.get("checkpoint_path") is not None:
            models.load(self.network, **self.pretrained)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, *others: Any, mode: str = "tensor"
    ) -> Any:
        """Return losses, `{"preds", "targets"}` or the network's output.

        Args:
            inputs: images (N, C, H, W), float or uint8, which is taken as float 0 to 255.
            targets: class ids (N,) or (N, H, W) of any integer type, or shares of the classes (N, classes).
            others: what else the batch holds.
            mode: `loss`, `predict` or `tensor`. Predictions are class ids (N, H, W), int64, or logits (N, classes).
        """
        if inputs.dtype == torch.uint8:  # pixels that no transform normalises
            inputs = inputs.float()
        if self.sliding_window is not None and mode == "predict" and not self.training:
            outputs: Any = slide(self.network, inputs, self.sliding_window)
        else:
            outputs = self.network(inputs)
        self.check_classes(main_output(outputs))
        if mode == "loss":
            if targets is not None:
                if isinstance(self.loss, _OF_CLASSES):
                    _check_targets(main_output(outputs), targets)
                self._count(outputs, inputs, targets)
            if main_output(outputs).ndim == 4:
                outputs = self.without_margin(outputs, inputs, targets)
                if targets is not None and isinstance(self.loss, _OF_CLASSES):
                    _check_size(main_output(outputs), targets)
            return self.losses(outputs, targets)
        return self.predictions(outputs, inputs, targets) if mode == "predict" else outputs

    def losses(self, outputs: Any, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the losses by name; of SuperGradients' pair, only the first is one."""
        try:
            losses: dict[str, Any] = super().losses(outputs, targets)
        except IndexError as error:  # on the CPU only: a device does not wait to see it
            if "out of bounds" not in str(error):
                raise
            raise DataError(
                f"a target is no class of the network, which has 0 to {main_output(outputs).shape[1] - 1}: {error} "
                "Give the network more classes (num_classes), or the loss the ignore_index of the targets"
            ) from error
        if isinstance(pair := losses.get("loss"), tuple):
            return {"loss": pair[0]}
        return losses

    def predictions(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        """Return class ids of pixels, or logits of images, and the class ids of the targets if there are any."""
        scores = main_output(outputs)
        if scores.ndim == 4:
            return super().predictions(outputs, inputs, targets)
        if targets is None:
            return {"preds": scores}
        mixed = targets.shape == scores.shape
        return {"preds": scores, "targets": targets.argmax(1) if mixed else targets}

    def read_train_metrics(self) -> dict[str, Any]:
        """Return what the metrics have counted, over all ranks, by name, and count from zero; waits for the device."""
        values: dict[str, Any] = {}
        for metric, counts in zip(self.train_metrics, self._counts(), strict=True):
            values.update(metric.read(counts))
            counts.zero_()
        return values

    @torch.no_grad()
    def _count(self, outputs: Any, inputs: Tensor, targets: Tensor) -> None:
        if not self.train_metrics:
            return
        found = self.predictions(outputs, inputs, targets)
        for metric, counts in zip(self.train_metrics, self._counts(), strict=True):
            metric.count(counts, found["preds"].detach(), found["targets"])

    def _counts(self) -> list[Tensor]:
        return [getattr(self, f"train_counts{place}") for place in range(len(self.train_metrics))]


def _check_targets(scores: Tensor, targets: Tensor) -> None:
    """Raise a `DataError` unless the targets are class ids or shares of classes; reads no device."""
    shares = targets.is_floating_point()
    if targets.shape == scores.shape if shares else targets.ndim == scores.ndim - 1:
        return
    ids = "(N,)" if scores.ndim == 2 else "(N, H, W)"
    one = not shares and targets.ndim == scores.ndim and targets.shape[1] == 1
    remedy = (
        "squeeze(1) them" if one else "convert class ids with .long()" if shares else "check the data set"
    )
    raise DataError(
        f"targets {tuple(targets.shape)} of {targets.dtype} do not fit the network's output {tuple(scores.shape)}: "
        f"they must be class ids {ids} of an integer dtype, or floating-point shares in the output's shape; {remedy}"
    )


def _check_size(scores: Tensor, targets: Tensor) -> None:
    """Raise a `DataError` unless the targets are as many, high and wide as the output; reads no device."""
    if (len(scores), *scores.shape[-2:]) != (len(targets), *targets.shape[-2:]):
        raise DataError(
            f"targets {tuple(targets.shape)} do not fit the network's output {tuple(scores.shape)}: they must be of "
            "its size; check the data set's transforms, which must change images and masks alike"
        )


def _counting(metric: CountingMetric | Mapping[str, Any], place: int) -> CountingMetric:
    built: Any = METRICS.build(metric) if isinstance(metric, Mapping) else metric
    if not isinstance(built, CountingMetric):
        raise ConfigError(
            f"{type(built).__name__} cannot count during training without waiting for the device: take IoU, "
            "PixelAccuracy, Dice, Accuracy or Top5, or move it to valid_metrics_list",
            f"train_metrics[{place}]",
        )
    return built


@HOOKS.register_module()
class TrainMetricsHook(Hook):
    """At the end of each epoch read what a `SupervisedModel` has counted, and log it as `train/IoU` and so on.

    It is also left in the message hub, as an info. A resumed epoch counts from where it was resumed.

    Raises:
        ModelError: before the training: the model counts nothing.
    """

    priority = "ABOVE_NORMAL"

    def before_train(self, runner: Runner) -> None:
        """Tell the metrics what the data set is."""
        meta = getattr(runner.train_dataloader.dataset, "metainfo", None) or {}
        for metric in self._model(runner).train_metrics:
            metric.dataset_meta = meta

    def after_train_epoch(self, runner: Runner) -> None:
        """Read, log and reset the metrics."""
        values = {f"train/{name}": value for name, value in self._model(runner).read_train_metrics().items()}
        # No scalar of the hub: the log lines of the next epoch would show it as their own, and plot it as val's.
        runner.message_hub.update_info_dict(values)
        text = "  ".join(f"{name}: {value:.4f}" for name, value in values.items())
        runner.logger.info(f"Epoch(train) [{runner.epoch + 1}]  {text}")
        runner.visualizer.add_scalars(values, step=runner.epoch + 1, file_path=runner.json_log)

    @staticmethod
    def _model(runner: Runner) -> SupervisedModel:
        model = unwrap_model(runner.model)
        if not isinstance(model, SupervisedModel) or not model.train_metrics:
            raise ModelError(
                f"TrainMetricsHook reads what a SupervisedModel counts, and {type(model).__name__} has no train_metrics"
            )
        return model
