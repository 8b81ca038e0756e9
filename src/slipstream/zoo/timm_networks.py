"""Classification networks from the timm library: `models.get("timm:convnext_tiny", num_classes=10)`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from slipstream.errors import CheckpointError, ConfigError, UnknownNameError, did_you_mean
from slipstream.extras import extra
from slipstream.model.weight_init import PretrainedWeights, load_pretrained
from slipstream.registry import MODELS
from slipstream.zoo.layers import check_num_classes
from slipstream.zoo.network import Network

# Prefix of the names of timm's networks in `models.get` and in `architecture`.
PREFIX = "timm:"
_SOURCE_OPTIONS = {
    "checkpoint_path",
    "checkpoint_paths",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "cache_dir",
}


class LibraryNetwork(Network, PretrainedWeights):
    """Base class of networks from other libraries, stored in the `model` submodule.

    Checkpoints with the library's own parameter names can be loaded. A subclass defines `_create`.
    """

    model: nn.Module
    # Prefix and name of the network in `models.get`.
    _full_name: str

    def _create(self, pretrained: bool) -> nn.Module:
        """Return a new network of the library."""
        raise NotImplementedError

    def _build(self, pretrained: bool) -> None:
        self.model = self._create(False)
        self.pretrained_pending = pretrained
        self.register_load_state_dict_pre_hook(add_prefix)

    def init_weights(self) -> None:
        """Load the library's weights if `pretrained` is True. Subsequent calls have no effect.

        Raises:
            CheckpointError: if the weights cannot be downloaded or loaded.
        """
        load_pretrained(self)

    def _load_pretrained(self) -> None:
        try:
            # The libraries adapt their weights to the options only in the function that creates the network.
            source = self._create(True)
        except Exception as error:  # a download can raise any exception
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(
                f"the pretrained weights of '{self._full_name}' cannot be loaded: {reason}; download them on a "
                "machine with internet access, and set checkpoint_path to the file"
            ) from error
        self._copy_pretrained(source)

    def _copy_pretrained(self, source: nn.Module) -> None:
        self.model.load_state_dict(source.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, num_classes) or (N, num_classes, H, W), for images (N, in_channels, H, W)."""
        return self.model(x)


@MODELS.register_module()
class TimmClassifier(LibraryNetwork):
    """A classification network from timm, stored in the `model` submodule.

    Checkpoints with timm's own parameter names can be loaded.

    Args:
        name: timm's name for the network, such as `convnext_tiny` or `resnet50.a1_in1k`.
        num_classes: number of classes.
        in_channels: number of image channels.
        pretrained: whether to use timm's weights, which are downloaded and read without unpickling objects. If False,
            the weights are initialized randomly. If True, `models.get` and `init_weights` load timm's weights. A Runner
            loads them before training, unless the run is resumed.
        options: additional arguments for `timm.create_model`, such as `drop_path_rate`.

    Raises:
        ModelError: if `num_classes` is less than 1.
        MissingPackageError: if timm cannot be imported.
        UnknownNameError: if timm has no network with this name.
    """

    task = "classification"

    def __init__(
        self, name: str, num_classes: int, in_channels: int = 3, pretrained: bool = False, **options: Any
    ) -> None:
        super().__init__(num_classes)
        if source := sorted(options.keys() & _SOURCE_OPTIONS):
            raise ConfigError(
                "is not supported, because timm would load unchecked files; pass the file to models.get",
                source[0],
            )
        timm = import_timm()
        if not timm.is_model(name):
            hint = did_you_mean(name, timm.list_models())
            raise UnknownNameError(
                f"timm {timm.__version__} has no network named '{name}'{hint}; timm.list_models() returns all names"
            )
        self._name, self._full_name = name, f"{PREFIX}{name}"
        self._arguments = dict(num_classes=num_classes, in_chans=in_channels, **options)
        self._build(pretrained)

    def _create(self, pretrained: bool) -> nn.Module:
        network: nn.Module = import_timm().create_model(self._name, pretrained=pretrained, **self._arguments)
        return network

    def get_finetune_lr_dict(self, lr: float) -> dict[str, float]:
        """Return the learning rates for SuperGradients' `finetune`, which freezes all layers except the classifier."""
        return {**{f"model.{name}": lr for name in self._classifier_names()}, "default": 0.0}

    def replace_head(self, new_num_classes: int) -> None:
        """Replace the classification layer with an untrained one; see `Network.replace_head`."""
        check_num_classes(new_num_classes)
        model: Any = self.model
        model.reset_classifier(new_num_classes)
        self._arguments["num_classes"] = new_num_classes
        self._processing, self._is_set_by_user = None, False

    def prep_model_for_conversion(self, input_size: Sequence[int] | None = None, **options: Any) -> None:
        """Merge timm's parallel branches into single convolutions, then prepare the network as `Network` does."""
        self.eval()
        self.model = import_timm().utils.reparameterize_model(self.model, inplace=True)
        super().prep_model_for_conversion(input_size, **options)

    def _classifier_names(self) -> tuple[str, ...]:
        """Return the names of the classification layers in `model`."""
        names: Any = getattr(self.model, "pretrained_cfg", {}).get("classifier") or ()
        return (names,) if isinstance(names, str) else tuple(names)


def import_timm() -> ModuleType:
    """Return the `timm` module.

    Raises:
        MissingPackageError: if timm is not installed.
    """
    with extra("timm"):
        import timm
    return timm


def add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepend `model.` to the names in a checkpoint that uses the library's own names."""
    inner = f"{prefix}model."
    if any(key.startswith(inner) for key in state_dict):
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
