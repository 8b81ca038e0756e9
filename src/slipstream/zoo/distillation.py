"""Losses for knowledge distillation, in which a student network learns from labels and a teacher's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.losses import at_least_float32
from slipstream.registry import MODELS
from slipstream.typecheck import Probability, check

_Mode = Literal["channel_wise", "spatial_wise"]
LossOrConfig = Callable[..., Any] | Mapping[str, Any]


class KDOutput(NamedTuple):
    """The outputs of the student and the teacher, passed as the first argument to a distillation loss."""

    student_output: Any
    teacher_output: Any


@MODELS.register_module()
class NormalizationAdapter(nn.Module):
    """Converts normalized images to the normalization that a different network requires.

    Returns `(x + (mean_original - mean_required) / std_original) * std_original / std_required` per channel.

    Args:
        mean_original, std_original: mean and standard deviation with which the images were normalized.
        mean_required, std_required: mean and standard deviation that the network requires.
    """

    def __init__(
        self,
        mean_original: Sequence[float],
        std_original: Sequence[float],
        mean_required: Sequence[float],
        std_required: Sequence[float],
    ) -> None:
        super().__init__()
        statistics = (mean_original, std_original, mean_required, std_required)
        mean, std, new_mean, new_std = (torch.tensor(values, dtype=torch.float64) for values in statistics)
        self.additive: Tensor
        self.multiplier: Tensor
        for name, values in (("additive", (mean - new_mean) / std), ("multiplier", std / new_std)):
            self.register_buffer(name, values.float().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the images (N, C, H, W) with the required normalization."""
        return (images + self.additive) * self.multiplier


@MODELS.register_module()
class KDklDivLoss(nn.Module):
    """The Kullback-Leibler divergence KL(teacher || student) of the probabilities, divided by the batch size.

    For logits (N, classes, H, W), the divergence is summed over all pixels, as in SuperGradients.
    """

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss as a 0-dim tensor, for logits (N, classes, ...) of both networks."""
        log_p = F.log_softmax(at_least_float32(student), dim=1)
        log_q = F.log_softmax(at_least_float32(teacher), dim=1)
        return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


@MODELS.register_module()
class KDLogitsLoss(nn.Module):
    """`(1 - c) task_loss(student, targets) + c distillation_loss(student, teacher)`.

    Args:
        task_loss_fn: a module, or its configuration, that computes the loss between the student's output and the
            labels.
        distillation_loss_fn: a module, or its configuration, that computes the loss between the student's output and
            the teacher's output. Default: `KDklDivLoss`.
        distillation_loss_coeff: the coefficient c, between 0 and 1.

    Raises:
        ConfigError: if `distillation_loss_coeff` is out of range.
    """

    def __init__(
        self,
        task_loss_fn: LossOrConfig,
        distillation_loss_fn: LossOrConfig | None = None,
        distillation_loss_coeff: float = 0.5,
    ) -> None:
        super().__init__()
        check(distillation_loss_coeff, Probability, "distillation_loss_coeff")
        self.task_loss_fn = _build(task_loss_fn)
        self.distillation_loss_fn = _build(distillation_loss_fn or KDklDivLoss())
        self.distillation_loss_coeff = distillation_loss_coeff

    def forward(self, outputs: KDOutput, targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_task": ..., "loss_distillation": ...}`, 0-dim tensors whose sum is the loss.

        Raises:
            ModelError: if `outputs` is not a `KDOutput`.
        """
        _check(outputs, type(self).__name__)
        task = _scalar(self.task_loss_fn(outputs.student_output, targets))
        student, teacher = _first_output(outputs.student_output), _first_output(outputs.teacher_output)
        weight = self.distillation_loss_coeff
        return {
            "loss_task": (1 - weight) * task,
            "loss_distillation": weight * self.distillation_loss_fn(student, teacher),
        }


@MODELS.register_module()
class ChannelWiseKnowledgeDistillationLoss(nn.Module):
    """The Kullback-Leibler divergence between the normalized maps of the student and the teacher (arXiv 2011.13256).

    Each map is softmax(logits / T), where T is the temperature, computed for each channel over its pixels or for each
    pixel over its channels. The sum of the divergences is multiplied by T^2 and divided by the number of maps.

    Args:
        normalization_mode: 'channel_wise' for one map per channel, or 'spatial_wise' for one map per pixel.
        temperature: the temperature T.
        ignore_index: target value of pixels that do not contribute to the sum.

    Raises:
        ConfigError: if `normalization_mode` is unknown.
    """

    def __init__(
        self,
        normalization_mode: _Mode = "channel_wise",
        temperature: float = 4.0,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self.normalization_mode = check(normalization_mode, _Mode, "normalization_mode")
        self.temperature = temperature
        self.ignore_index = ignore_index

    def forward(self, student: Tensor, teacher: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss as a 0-dim tensor.

        Args:
            student, teacher: logits (N, channels, H, W) of both networks.
            targets: class ids (N, H, W), or None, in which case `ignore_index` has no effect.
        """
        by_channel = self.normalization_mode == "channel_wise"
        dim = 2 if by_channel else 1
        log_p, log_q = (
            F.log_softmax(at_least_float32(logits).flatten(2) / self.temperature, dim=dim)
            for logits in (student, teacher)
        )
        divergence = F.kl_div(log_p, log_q, reduction="none", log_target=True)
        if self.ignore_index is not None and targets is not None:
            divergence = divergence * (targets.flatten(1) != self.ignore_index).unsqueeze(1)
        batch, channels, pixels = divergence.shape
        maps = batch * (channels if by_channel else pixels)
        return divergence.sum() * (self.temperature**2 / maps)


@MODELS.register_module()
class SegKDLoss(nn.Module):
    """The sum of `kd_loss_weights[0] * ce_loss + kd_loss_weights[1] * kd_loss` over the outputs, weighted by `weights`.

    Args:
        kd_loss: a callable `loss(student, teacher, targets)`, such as `ChannelWiseKnowledgeDistillationLoss`, or its
            configuration.
        ce_loss: a callable `loss(student, targets)`, or its configuration.
        weights: one factor for each output of the networks. Outputs without a factor are ignored.
        kd_loss_weights: factors for `ce_loss` and `kd_loss`, in this order.

    Raises:
        ConfigError: if `kd_loss_weights` does not contain two numbers.
    """

    def __init__(
        self,
        kd_loss: LossOrConfig,
        ce_loss: LossOrConfig,
        weights: Sequence[float],
        kd_loss_weights: Sequence[float],
    ) -> None:
        super().__init__()
        check(kd_loss_weights, tuple[float, float], "kd_loss_weights")
        self.kd_loss, self.ce_loss = _build(kd_loss), _build(ce_loss)
        self.weights, self.kd_loss_weights = tuple(weights), tuple(kd_loss_weights)

    def forward(self, outputs: KDOutput, targets: Tensor) -> dict[str, Tensor]:
        """Return `{"loss_ce0": ..., "loss_kd0": ..., ...}`, 0-dim tensors whose sum is the loss.

        Raises:
            ModelError: if `outputs` is not a `KDOutput`, or a network returns fewer outputs than there are weights.
        """
        _check(outputs, type(self).__name__)
        students, teachers = _as_tuple(outputs.student_output), _as_tuple(outputs.teacher_output)
        if min(len(students), len(teachers)) < len(self.weights):
            raise ModelError(
                f"SegKDLoss requires one output per weight ({len(self.weights)}), but the student returns "
                f"{len(students)} and the teacher returns {len(teachers)}; set `weights` to one factor per output"
            )
        losses = {}
        for index, weight in enumerate(self.weights):
            student, teacher = students[index], teachers[index]
            ce, kd = self.kd_loss_weights
            losses[f"loss_ce{index}"] = weight * ce * _scalar(self.ce_loss(student, targets))
            losses[f"loss_kd{index}"] = weight * kd * self.kd_loss(student, teacher, targets)
        return losses


def _build(loss: LossOrConfig) -> Any:
    return MODELS.build(loss) if isinstance(loss, Mapping) else loss


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _first_output(outputs: Any) -> Tensor:
    return _as_tuple(outputs)[0]


def _scalar(loss: Any) -> Tensor:
    """Return a scalar loss, given a scalar, a dict of scalars or SuperGradients' pair (scalar, logged values)."""
    if isinstance(loss, Mapping):
        return torch.stack([value for name, value in loss.items() if "loss" in name]).sum()
    return loss[0] if isinstance(loss, tuple) else loss


def _check(outputs: Any, loss: str) -> None:
    if not isinstance(outputs, KDOutput):
        raise ModelError(
            f"{loss} requires the outputs of a student and a teacher; train with KDTrainer, or set "
            "architecture: kd_module in the recipe"
        )
