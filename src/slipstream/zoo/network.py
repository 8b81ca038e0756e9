"""The base class of the zoo's networks, with SuperGradients' methods for prediction and deployment."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from slipstream.errors import ModelError
from slipstream.losses import Upsampled, supports_low_resolution
from slipstream.zoo.layers import check_num_classes
from slipstream.zoo.predicting import Processing, predict, stored_processing
from slipstream.zoo.predictions import ImagePrediction, ImagesPredictions


class Network(nn.Module):
    """Base class of the zoo's networks.

    A subclass defines `_classifiers`, and either `heads` or `forward`. If it has auxiliary heads, it also overrides
    `_remove_auxiliary_heads`.
    """

    # `segmentation` or `classification`.
    task: ClassVar[str] = "segmentation"
    # Regular expression that matches the names of the layers that return the class logits.
    _classifiers: ClassVar[str] = ""
    # Prefixes of the submodules that SuperGradients' `replace_head` reinitializes, besides the classification layers.
    _replaced_heads: ClassVar[tuple[str, ...]] = ()
    # Prefixes of the names of the parameters that SuperGradients' `finetune` trains.
    _finetuned: ClassVar[tuple[str, ...]] = ()
    # How `forward` interpolates the logits.
    _align_corners: ClassVar[bool] = False
    _processing: Processing | None = None
    _is_set_by_user = False

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)

    @supports_low_resolution
    def forward(self, x: Tensor, upsample: bool = True) -> Any:
        """Return the logits of `heads`, interpolated to the height and width of the images `x` (N, 3, H, W).

        Args:
            x: images of any size.
            upsample: if False, return `slipstream.losses.Upsampled` instead of tensors.
        """
        outputs = self.heads(x)
        size = (x.shape[-2], x.shape[-1])
        logits = outputs if isinstance(outputs, tuple) else (outputs,)
        found: list[Any] = [Upsampled(head, size, self._align_corners) for head in logits]
        if upsample:
            found = [head.full() for head in found]
        return tuple(found) if isinstance(outputs, tuple) else found[0]

    def heads(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the logits (N, C, h, w), or the tuple of the main and the auxiliary logits, before interpolation."""
        raise NotImplementedError

    def set_dataset_processing_params(
        self,
        class_names: Sequence[str] | None = None,
        image_processor: Sequence[Any] | Mapping[str, Any] | None = None,
        palette: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Set the transforms, class names and palette for `predict`. None leaves the current value unchanged.

        `Trainer.train` sets these values from the validation data. `models.get` sets them from a recipe's checkpoint.

        Args:
            class_names: names of the classes.
            image_processor: validation transforms, as in recipes: names, `{Name: {arguments}}` or objects.
                SuperGradients' `{ComposeProcessing: {processings: [...]}}` is also accepted.
            palette: an RGB color for each class, used to draw masks.

        Raises:
            ConfigError: if the transforms are invalid.
        """
        current = self._processing or Processing()
        self._is_set_by_user = True
        self._processing = Processing.read(
            self.task,
            current.class_names if class_names is None else class_names,
            current.transforms if image_processor is None else image_processor,
            current.palette if palette is None else palette,
        )

    def set_processing_from_checkpoint(self, meta: Any) -> None:
        """Set the processing parameters from a checkpoint's `meta` entry, if the entry contains them."""
        if (processing := stored_processing(meta, self.task)) is not None:
            self._processing = processing

    def set_processing_from_data(
        self,
        class_names: Sequence[str] | None,
        transforms: Sequence[Any],
        palette: Sequence[Sequence[int]] | None,
    ) -> None:
        """Set the processing parameters from validation data, unless `set_dataset_processing_params` has been called.

        Parameters from a checkpoint or from other data are replaced.

        Raises:
            ConfigError: if the transforms are invalid.
        """
        if not self._is_set_by_user:
            self._processing = Processing.read(self.task, class_names, transforms, palette)

    @property
    def has_processing(self) -> bool:
        """Whether the processing parameters have been set."""
        return self._processing is not None

    def predict(
        self, images: Any, batch_size: int = 32, fuse_model: bool = False, fp16: bool = False
    ) -> ImagePrediction | ImagesPredictions:
        """Return the prediction for an image, or the predictions for a list or a folder of images.

        Call `set_dataset_processing_params` first to set the transforms and the class names. If they have never been
        set, a warning is logged, images are normalized as in the recipes for Cityscapes and ImageNet, and the class ids
        are used as class names.

        Args:
            images: a path, a folder, a Pillow image, a uint8 array (H, W, 3) in RGB or (H, W), a uint8 tensor
                (3, H, W), or a list of these.
            batch_size: maximum batch size. Only consecutive images of the same size form a batch.
            fuse_model: whether to predict with a copy of the network that `prep_model_for_conversion` has prepared, and
                in which BatchNorm layers are merged into the convolutions before them. It is faster, and its outputs
                are equal up to rounding.
            fp16: whether to use float16 where autocast allows it. This option has no effect on the CPU.

        Raises:
            DataError: if a file cannot be read, or an image has an unsupported dtype or shape.
        """
        network = _fused(self) if fuse_model else self
        return predict(network, images, self.task, self._processing, batch_size, fp16)

    def get_finetune_lr_dict(self, lr: float) -> dict[str, float]:
        """Return the learning rates for SuperGradients' `finetune`, which trains the heads and freezes the rest."""
        return {**dict.fromkeys(self._finetuned, lr), "default": 0.0}

    def replace_head(self, new_num_classes: int) -> None:
        """Replace the classification layers with untrained ones for `new_num_classes` classes.

        As in SuperGradients, all layers in the heads of DDRNet, STDC, RegSeg and SegFormer are reinitialized.

        Raises:
            ModelError: if `new_num_classes` is less than 1.
        """
        check_num_classes(new_num_classes)
        for name, layer in list(self.named_modules()):
            if re.fullmatch(self._classifiers, name):
                self.set_submodule(name, _with_outputs(layer, new_num_classes))
        for name, module in self.named_modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None and name.startswith(self._replaced_heads):
                reset()
        # The processing parameters describe the classes of the old head.
        self._processing, self._is_set_by_user = None, False

    def prep_model_for_conversion(self, input_size: Sequence[int] | None = None, **_: Any) -> None:
        """Prepare the network for export, in place: remove the auxiliary heads, and set the evaluation mode.

        The arguments have no effect.
        """
        self._remove_auxiliary_heads()
        self.eval()

    def _remove_auxiliary_heads(self) -> None:
        """Remove the heads that are used only in training."""


def _fused(network: Network) -> Network:
    """Return a copy in which each BatchNorm layer after a convolution in an `nn.Sequential` is merged into it."""
    network = copy.deepcopy(network)
    network.prep_model_for_conversion()
    for block in list(network.modules()):
        if isinstance(block, nn.Sequential) and type(block).forward is nn.Sequential.forward:
            for (first, conv), (second, norm) in pairwise(list(block._modules.items())):
                if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d and norm.track_running_stats:
                    setattr(block, first, fuse_conv_bn_eval(conv, norm))
                    setattr(block, second, nn.Identity())
    return network


def _with_outputs(layer: nn.Module, count: int) -> nn.Module:
    """Return an untrained layer with `count` outputs. Its other options, dtype and device are those of `layer`."""
    options: dict[str, Any] = dict(bias=getattr(layer, "bias", None) is not None)
    weight = next(layer.parameters())
    options |= dict(dtype=weight.dtype, device=weight.device)
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, count, **options)
    if not isinstance(layer, nn.Conv2d):
        raise ModelError(
            f"the classification layer is a {type(layer).__name__}, which cannot be replaced; only nn.Linear and "
            "nn.Conv2d are supported, so create a new network with the new number of classes"
        )
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    options |= {name: getattr(layer, name) for name in names}
    return nn.Conv2d(layer.in_channels, count, **options)
