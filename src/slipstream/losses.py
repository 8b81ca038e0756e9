"""Losses of upsampled logits, computed in strips of rows, so that the upsampled logits are never stored.

The forward pass stores one loss per pixel and, for Dice, two sums per class. The backward pass computes the softmax of
each strip again, and reduces its gradient to the low resolution with the transposed interpolation matrices. All
operations are deterministic. Each function also accepts logits that already have the size of the targets.

    losses = cross_entropy(Upsampled(logits, (768, 768)), targets, ignore_index=255)  # (N, 768, 768)
    weights = hard_pixels(losses.detach(), targets != 255, threshold=0.7, min_kept=1 / 16)
    loss = (weights * losses).sum()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils import _pytree

from slipstream.errors import DataError, LossError

__all__ = [
    "Upsampled", "binary_cross_entropy_and_sums", "cross_entropy", "cross_entropy_and_sums", "dice_loss", "edges",
    "hard_pixels", "interpolate", "supports_low_resolution",
]  # fmt: skip

# Number of logits in a strip. Smaller strips fit better into the cache of a CPU, but each of their operations waits for
# all threads, which takes long if other processes use the cores.
_STRIP, _ACCELERATOR_STRIP = 2**20, 2**23


@dataclass(frozen=True)
class Upsampled:
    """Logits (N, C, h, w) that represent their bilinear interpolation, which only `full` and `argmax` compute."""

    logits: Tensor
    size: tuple[int, int]
    """Height and width of the interpolated logits."""
    align_corners: bool = False
    crop: tuple[int, int] | None = None
    """Height and width of the part of the interpolated logits that is used, at their top left. Default: `size`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the full-resolution logits."""
        return (self.logits.shape[0], self.logits.shape[1], *(self.crop or self.size))

    @property
    def ndim(self) -> int:
        """Number of dimensions: 4."""
        return 4

    def cut(self, height: int, width: int) -> Upsampled:
        """Return the top left part of the logits."""
        return replace(self, crop=(height, width))

    def full(self) -> Tensor:
        """Return the full-resolution logits."""
        height, width = self.shape[-2:]
        return interpolate(self.logits, self.size, self.align_corners)[..., :height, :width]

    @torch.no_grad()
    def argmax(self, dim: int) -> Tensor:
        """Return the class ids (N, H, W) with the largest logits, computed in strips; `dim` must be 1."""
        enlarged = _Enlarged(self.logits, self.size, self.align_corners, self.shape[-2:])
        return torch.cat([enlarged.strip(rows, source).argmax(dim) for rows, source in enlarged], 1)


_pytree.register_pytree_node(
    Upsampled,
    lambda value: ([value.logits], (value.size, value.align_corners, value.crop)),
    lambda children, context: Upsampled(*children, *context),
)


# ---- losses -------------------------------------------------------------------------------------------------

Outputs = Tensor | Upsampled


def cross_entropy(
    outputs: Outputs,
    targets: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the loss of each element like `F.cross_entropy` with `reduction="none"`, in at least float32.

    Args:
        outputs: logits (N, C, ...), or `Upsampled` logits.
        targets: class ids (N, ...) of any integer dtype.
        weight: weight of each class (C,).
        label_smoothing: amount of smoothing, between 0 and 1.
        ignore_index: target value whose loss is 0.

    Raises:
        DataError: if the sizes of the pixels' logits and of the targets differ.
        IndexError: on the CPU, if a target is out of range.
    """
    if outputs.ndim == 4:
        return _pixel_losses(outputs, targets, weight, label_smoothing, ignore_index, False)[0]
    logits, targets = at_least_float32(full(outputs)), targets.long()
    return F.cross_entropy(
        logits, targets, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )


def cross_entropy_and_sums(
    outputs: Outputs, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (N, H, W) of `cross_entropy`, and the intersection and the area of each class for `dice_loss`.

    For the softmax p, the intersection of a class is the sum of p over the pixels of this class. The area is the sum of
    p over all pixels that are not ignored, plus the number of pixels of this class.
    """
    return _pixel_losses(outputs, targets, None, 0.0, ignore_index, True)


def binary_cross_entropy_and_sums(outputs: Outputs, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (N, H, W) of logits (N, 1, H, W), and the intersection and the area of the mask (0-dim).

    The losses are those of `F.binary_cross_entropy_with_logits`, for a mask (N, H, W) of zeros and ones.
    """
    logits = outputs.logits if isinstance(outputs, Upsampled) else outputs
    # The sigmoid of a logit is the softmax of this logit and 0.
    logits = torch.cat((torch.zeros_like(logits), logits), 1)
    pairs = replace(outputs, logits=logits) if isinstance(outputs, Upsampled) else logits
    losses, hits, areas = cross_entropy_and_sums(pairs, truth)
    return losses, hits[1], areas[1]


def dice_loss(intersection: Tensor, area: Tensor, smooth: float = 1.0, eps: float = 1e-5) -> Tensor:
    """Return the mean over the classes of `1 - (2 intersection + smooth) / (area + smooth + eps)`."""
    return (1 - (2 * intersection + smooth) / (area + smooth + eps)).mean()


def edges(targets: Tensor, kernel: int) -> Tensor:
    """Return a mask (N, H, W) that is True where the `kernel` x `kernel` neighborhood has more than one label."""
    # The maximum minus the minimum label in the neighborhood.
    labels = targets.float()
    extremes = torch.stack((labels, -labels), dim=1)
    extremes = F.max_pool2d(extremes, (kernel, 1), stride=1, padding=(kernel // 2, 0))
    extremes = F.max_pool2d(extremes, (1, kernel), stride=1, padding=(0, kernel // 2))
    return extremes.sum(1) != 0


def hard_pixels(losses: Tensor, valid: Tensor, threshold: float, min_kept: float) -> Tensor:
    """Return the weights, with the sum 1, of the hard pixels in the mean of cross-entropy losses (arXiv 1604.03540).

    Hard pixels are those whose target class has a predicted probability below `threshold`. If there are fewer than
    k = max(1, floor(min_kept * n)) of them, where n is the number of valid pixels, the k pixels with the largest losses
    are used instead; if several pixels have the kth largest loss, they share the remaining weight equally.

    Args:
        losses: losses of any shape, without gradient, 0 where they are not valid.
        valid: True for pixels that are not ignored.
        threshold: probability, greater than 0 and at most 1.
        min_kept: fraction of the valid pixels.
    """
    max_kept = max(1, int(min_kept * losses.numel()))
    # The number of pixels to keep is known only on the device, so select the kth largest loss from the `max_kept`
    # largest losses. Ignored pixels have the smallest possible loss, 0.
    keep = (valid.sum() * min_kept).long().clamp(1, max_kept)
    kth = losses.flatten().topk(max_kept).values.gather(0, (keep - 1).reshape(1))
    cut = kth.clamp_max(-math.log(threshold))
    above, tied = losses > cut, losses == cut
    hard = above.sum()
    remaining = (keep - hard).clamp_min(0).to(losses.dtype)
    return (above + tied * (remaining / tied.sum().clamp_min(1))) / torch.maximum(keep, hard)


def full(outputs: Outputs) -> Tensor:
    """Return the full-resolution logits."""
    return outputs.full() if isinstance(outputs, Upsampled) else outputs


def all_heads(outputs: Outputs | Sequence[Outputs]) -> tuple[Outputs, ...]:
    """Return the outputs of a network with one or several heads as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor | Upsampled) else tuple(outputs)


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert float16 and bfloat16 logits to float32, so that sums over many pixels are accurate."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


# ---- which networks and losses exchange low-resolution logits -----------------------------------------------


def supports_low_resolution(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the `forward` of a network that returns `Upsampled` if called with `upsample=False`, or of a loss for it."""
    forward.supports_low_resolution = True  # type: ignore[attr-defined]
    return forward


def exchange_low_resolution(network: Any, loss: Any) -> bool:
    """Return whether the network can pass `Upsampled` to the loss: nothing else, such as a hook, reads its output."""
    return _is_marked(network) and _is_marked(loss)


def reads_low_resolution(module: Any) -> bool:
    """Return whether the class of a network or a loss supports `Upsampled`."""
    return getattr(getattr(type(module), "forward", None), "supports_low_resolution", False)


def _is_marked(module: Any) -> bool:
    if not reads_low_resolution(module):
        return False
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        torch_module._global_forward_hooks, torch_module._global_backward_hooks,
    )  # fmt: skip
    return not ("forward" in vars(module) or any(hooks))


# ---- interpolation ------------------------------------------------------------------------------------------


def interpolate(x: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Return `x` (N, C, h, w) interpolated bilinearly to (height, width) = `size`.

    The result matches `F.interpolate`, but is computed as two matrix products, which is several times faster on CPU.
    The gradient is deterministic on all devices. With `align_corners`, the centers of the corner pixels are aligned.
    Without it, the edges of the images are aligned.
    """
    # F.interpolate is not used, because on CPU, inductor (torch 2.13) may compute a gradient of zero for it.
    rows, columns = (
        _interpolation(x, source, target, align_corners)
        for source, target in zip(x.shape[-2:], size, strict=True)
    )
    return rows @ (x @ columns.T)


def _interpolation(x: Tensor, source: int, target: int, align_corners: bool) -> Tensor:
    """Return the linear interpolation matrix (target, source) in the dtype and on the device of `x`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = torch.arange(target, dtype=dtype, device=x.device)
    if align_corners:
        positions = positions * ((source - 1) / max(target - 1, 1))
    else:
        positions = (positions + 0.5) * (source / target) - 0.5
    positions = positions.clamp(0, source - 1)
    distances = (positions[:, None] - torch.arange(source, dtype=dtype, device=x.device)).abs()
    return (1 - distances).clamp_min(0).to(x.dtype)


class _Enlarged:
    """Interpolated logits (N, C, height, width), computed strip by strip.

    Iteration yields the rows of each strip, and the rows of the low-resolution logits on which it depends.
    """

    def __init__(self, low: Tensor, size: Sequence[int], align_corners: bool, shape: Sequence[int]) -> None:
        self.height, self.width = shape
        self.low = self.wide = low
        # None if the logits already have the right size.
        self.rows: Tensor | None = None
        if tuple(low.shape[-2:]) != tuple(size):
            self.rows = _interpolation(low, low.shape[-2], size[0], align_corners)
            self.columns = _interpolation(low, low.shape[-1], size[1], align_corners)[: self.width]
            self.wide = low @ self.columns.T
        self.scale = (low.shape[-2] - align_corners) / max(size[0] - align_corners, 1)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        budget = _STRIP if self.low.device.type == "cpu" else _ACCELERATOR_STRIP
        step = max(1, budget // max(self.low.shape[0] * self.low.shape[1] * self.width, 1))
        for top in range(0, self.height, step):
            rows = slice(top, min(top + step, self.height))
            # One row more than necessary at each end, because of rounding.
            first, last = int(rows.start * self.scale) - 2, int(rows.stop * self.scale) + 3
            yield rows, slice(max(first, 0), last) if self.rows is not None else rows

    def strip(self, rows: slice, source: slice) -> Tensor:
        """Return the logits (N, C, rows, width) of a strip."""
        part = self.wide[:, :, source, : self.width]
        return part if self.rows is None else self.rows[rows, source] @ part

    def reduce(self, gradient: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Return the gradient of the low-resolution logits, given a function that computes that of a strip."""
        wide = torch.zeros_like(self.wide, memory_format=torch.contiguous_format)
        for rows, source in self:
            strip = gradient(rows, self.strip(rows, source))
            strip = strip if self.rows is None else self.rows[rows, source].T @ strip
            wide[:, :, source, : self.width] += strip
        return wide if self.rows is None else wide @ self.columns


# ---- the operators ------------------------------------------------------------------------------------------


def _pixel_losses(
    outputs: Outputs, targets: Tensor, weight: Tensor | None, smoothing: float, ignore_index: int, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(outputs, Upsampled):
        outputs = Upsampled(outputs, (outputs.shape[-2], outputs.shape[-1]))
    if (outputs.shape[0], *outputs.shape[2:]) != tuple(targets.shape):
        raise DataError(
            f"targets of shape {tuple(targets.shape)} and logits of shape {outputs.shape} differ in size; check the "
            "dataset's transforms"
        )
    options = (smoothing, ignore_index, outputs.size, outputs.align_corners, sums)
    found: tuple[Tensor, Tensor, Tensor] = _softmax_losses(
        at_least_float32(outputs.logits), targets, weight, *options
    )
    return found


@torch.library.custom_op(
    "slipstream::softmax_losses",
    mutates_args=(),
    schema="(Tensor low, Tensor targets, Tensor? weight, float smoothing, int ignore_index, SymInt[] size, "
    "bool align_corners, bool sums) -> (Tensor, Tensor, Tensor)",
)
def _softmax_losses(
    low: Tensor, targets: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (N, H, W) and the sums (C) of `cross_entropy_and_sums`."""
    smoothing, ignore_index, size, align_corners, sums = options
    classes = low.shape[1]
    losses = low.new_zeros(targets.shape)
    hits, areas = low.new_zeros(classes), low.new_zeros(classes)
    with torch.autocast(low.device.type, enabled=False):
        enlarged = _Enlarged(low, size, align_corners, targets.shape[-2:])
        for rows, source in enlarged:
            log_p = torch.log_softmax(enlarged.strip(rows, source), 1)
            labels, valid, factor = _labels(targets[:, rows], classes, ignore_index, weight)
            picked = log_p.gather(1, labels)
            loss = picked[:, 0] * (factor * (smoothing - 1))
            if smoothing:
                uniform = log_p.new_full((classes,), 1.0) if weight is None else weight.to(log_p.dtype)
                loss -= torch.einsum("nchw,c->nhw", log_p, uniform * (smoothing / classes))
            losses[:, rows] = torch.where(valid, loss, 0)
            if sums:
                inside = valid.unsqueeze(1)
                hits += _sum_by_class(picked.exp() * inside, labels, classes)
                areas += _sum_by_class(inside.to(losses), labels, classes)
                areas += log_p.exp_().mul_(inside).sum((0, 2, 3))
    return losses, hits, areas


@_softmax_losses.register_fake
def _(low: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    classes = low.shape[1]
    return low.new_empty(targets.shape), low.new_empty(classes), low.new_empty(classes)


@torch.library.custom_op(
    "slipstream::softmax_losses_backward",
    mutates_args=(),
    schema="(Tensor g_losses, Tensor g_hits, Tensor g_areas, Tensor low, Tensor targets, Tensor? weight, "
    "float smoothing, int ignore_index, SymInt[] size, bool align_corners, bool sums) -> Tensor",
)
def _softmax_losses_backward(g_losses: Tensor, g_hits: Tensor, g_areas: Tensor, *inputs: Any) -> Tensor:
    """Return the gradient of the logits."""
    low, targets, weight, smoothing, ignore_index, size, align_corners, sums = inputs
    classes = low.shape[1]
    uniform = low.new_full((classes,), 1.0) if weight is None else weight.to(low.dtype)
    uniform = (uniform * (smoothing / classes)).view(-1, 1, 1)

    def gradient(rows: slice, logits: Tensor) -> Tensor:
        p = torch.softmax(logits, 1)
        labels, valid, factor = _labels(targets[:, rows], classes, ignore_index, weight)
        g_loss = torch.where(valid, g_losses[:, rows], 0)
        at_label = g_loss * factor * (smoothing - 1)
        scale = uniform.sum() * g_loss - at_label if smoothing else -at_label
        scale = scale.unsqueeze(1)
        at_label = at_label.unsqueeze(1)
        if sums:
            p.mul_(valid.unsqueeze(1))
            hit = p.gather(1, labels) * g_hits[labels]
            mean = torch.einsum("nchw,c->nhw", p, g_areas).unsqueeze(1)
            scale = scale - hit - mean + g_areas.view(-1, 1, 1)
            at_label = at_label + hit
        p.mul_(scale)
        if smoothing:
            p.addcmul_(uniform, g_loss.unsqueeze(1), value=-1)
        return p.scatter_add_(1, labels, at_label)

    with torch.autocast(low.device.type, enabled=False):
        return _Enlarged(low, size, align_corners, targets.shape[-2:]).reduce(gradient)


@_softmax_losses_backward.register_fake
def _(g_losses: Tensor, g_hits: Tensor, g_areas: Tensor, low: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(low, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    low, targets, weight, *ctx.options = inputs
    ctx.save_for_backward(low, targets, weight)


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    return (_softmax_losses_backward(*gradients, *ctx.saved_tensors, *ctx.options), *[None] * 7)


def _second_backward(*_: Any) -> None:
    raise LossError(
        "slipstream.losses has no second derivative (create_graph=True); call the network without upsample=False, and "
        "compute the loss with torch.nn.functional.cross_entropy"
    )


_softmax_losses.register_autograd(_backward, setup_context=_setup_context)
_softmax_losses_backward.register_autograd(_second_backward)


def _sum_by_class(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the sum (C) of the values (N, 1, H, W) of each class."""
    if values.device.type == "cpu":
        return torch.bincount(labels.flatten(), values.flatten().double(), classes)
    # Atomic additions would not be deterministic.
    ids = torch.arange(classes, device=values.device).view(-1, 1, 1)
    return torch.where(labels == ids, values, 0).sum((0, 2, 3))


def _labels(
    targets: Tensor, classes: int, ignore_index: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return the class ids (N, 1, H, W), 0 where they are ignored, where they are not ignored, and their weights."""
    targets = targets.long()
    valid = targets != ignore_index
    labels = torch.where(valid, targets, 0)
    # As in torch, other devices stop the process.
    if labels.device.type == "cpu" and labels.numel() and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds.")
    return labels.unsqueeze(1), valid, 1.0 if weight is None else weight[labels]
