"""Segmentation networks from segmentation_models_pytorch: `models.get("smp:unet", num_classes=19)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from slipstream.errors import ModelError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.registry import MODELS
from slipstream.zoo.timm_networks import LibraryNetwork


@MODELS.register_module()
class SmpSegmentor(LibraryNetwork):
    """A segmentation network from segmentation_models_pytorch, stored in the `model` submodule.

    Checkpoints with the library's own parameter names can be loaded. Most networks require images whose height and
    width are multiples of 32.

    Args:
        name: the library's name for the decoder, such as `unet`, `fpn` or `deeplabv3plus`.
        num_classes: number of classes.
        in_channels: number of image channels.
        pretrained: whether to use the library's weights of the encoder, as in `TimmClassifier`.
        encoder_weights: name of these weights; by default, `imagenet`. If it is set, `pretrained` is not required.
        options: additional arguments for `segmentation_models_pytorch.create_model`, such as `encoder_name`.

    Raises:
        ModelError: if `num_classes` is less than 1.
        MissingPackageError: if the library cannot be imported.
        UnknownNameError: if the library has no network with this name.
    """

    task = "segmentation"
    _classifiers = r"model\.segmentation_head\.0"

    def __init__(
        self,
        name: str,
        num_classes: int,
        in_channels: int = 3,
        pretrained: bool = False,
        encoder_weights: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_classes)
        with extra("smp"):
            import segmentation_models_pytorch as smp
        known = smp.MODEL_ARCHITECTURES_MAPPING
        if name.lower() not in known:
            raise UnknownNameError(
                f"segmentation_models_pytorch {smp.__version__} has no network named '{name}'"
                f"{did_you_mean(name, known)} (available: {', '.join(sorted(known))})"
            )
        self._full_name, self._weights = f"smp:{name}", encoder_weights or "imagenet"
        self._arguments = dict(arch=name, in_channels=in_channels, classes=num_classes, **options)
        self._build(pretrained or encoder_weights is not None)

    def _create(self, pretrained: bool) -> nn.Module:
        from segmentation_models_pytorch import create_model

        network: nn.Module = create_model(
            encoder_weights=self._weights if pretrained else None, **self._arguments
        )
        return network

    def _copy_pretrained(self, source: Any) -> None:
        self.model.encoder.load_state_dict(source.encoder.state_dict())  # type: ignore[union-attr]

    def get_finetune_lr_dict(self, lr: float) -> dict[str, float]:
        """Return the learning rates for SuperGradients' `finetune`, which freezes all layers except the head."""
        return {"model.segmentation_head": lr, "default": 0.0}

    def replace_head(self, new_num_classes: int) -> None:
        """Replace the classification layer with an untrained one; see `Network.replace_head`."""
        if not isinstance(getattr(self.model, "segmentation_head", None), nn.Sequential):
            raise ModelError(f"the head of '{self._full_name}' cannot be replaced; create a new network")
        super().replace_head(new_num_classes)
        self._arguments["classes"] = new_num_classes
