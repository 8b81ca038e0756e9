"""Pretrained weights that are loaded before training, instead of in a module's constructor."""

from __future__ import annotations

from torch import nn

__all__ = ["PretrainedWeights", "load_pretrained", "needs_pretrained", "skip_pretrained"]


class PretrainedWeights:
    """Mixin for modules with pretrained weights, which a subclass loads in `_load_pretrained`.

    The constructor sets `pretrained_pending` and must not load the weights. Loading may start a download, which a
    resumed run does not need, and which `slipstream predict` must not start for a checkpoint from an untrusted source.
    """

    pretrained_pending = False
    """Whether the pretrained weights have yet to be loaded by `load_pretrained`."""

    def _load_pretrained(self) -> None:
        raise NotImplementedError


def needs_pretrained(model: nn.Module) -> bool:
    """Return whether the model or one of its submodules has pretrained weights that have not been loaded yet."""
    return any(
        isinstance(module, PretrainedWeights) and module.pretrained_pending for module in model.modules()
    )


def load_pretrained(model: nn.Module) -> None:
    """Load the pretrained weights that have not been loaded yet, in the model and its submodules."""
    # Load submodules first, so that the weights of the whole model take precedence.
    for module in reversed(list(model.modules())):
        if isinstance(module, PretrainedWeights) and module.pretrained_pending:
            module._load_pretrained()
            module.pretrained_pending = False


def skip_pretrained(model: nn.Module) -> None:
    """Cancel the loading of pretrained weights, for a model whose weights are all replaced by a checkpoint."""
    for module in model.modules():
        if isinstance(module, PretrainedWeights):
            module.pretrained_pending = False
