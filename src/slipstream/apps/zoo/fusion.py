"""Fusion of convolutions with the BatchNorm that follows them, for inference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

__all__ = ["fuse_batch_norms"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def fuse_batch_norms(network: nn.Module, example: Tensor) -> int:
    """Multiply the weights of each convolution by the BatchNorm that follows it, in place. Return the number of pairs.

    A convolution and a BatchNorm form a pair if, in one call of the network, both are called once and the BatchNorm
    receives the unchanged output of the convolution. Each BatchNorm is replaced with the identity. Outputs in
    evaluation mode are the same, up to rounding. The network is in evaluation mode afterwards.

    Args:
        network: the network.
        example: an input of the network.
    """
    network.eval()
    pairs = _pairs(network, example)
    names = {module: name for name, module in network.named_modules()}
    for conv, norm in pairs:
        fused: Any = fuse_conv_bn_eval(conv, norm, transpose=isinstance(conv, _TRANSPOSED))
        network.set_submodule(names[conv], fused)
        network.set_submodule(names[norm], nn.Identity())
    return len(pairs)


def _pairs(network: nn.Module, example: Tensor) -> list[tuple[Any, Any]]:
    calls: Counter[nn.Module] = Counter()
    found: list[tuple[nn.Module, nn.Module]] = []
    # The outputs are kept so that their ids stay unique. An in-place operation changes the version of an output.
    outputs: dict[int, tuple[nn.Module, Tensor, int]] = {}

    def after_convolution(module: nn.Module, _: Any, output: Tensor) -> None:
        calls[module] += 1
        outputs[id(output)] = module, output, output._version

    def before_norm(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls[module] += 1
        conv, output, version = outputs.get(id(arguments[0]), (None, None, 0))
        if conv is not None and output is not None and output._version == version:
            found.append((conv, module))

    handles = []
    for module in network.modules():
        if type(module) in _CONVOLUTIONS or getattr(module, "fuses_norm", False):
            handles.append(module.register_forward_hook(after_convolution))
        elif type(module) in _NORMS and getattr(module, "running_mean", None) is not None:
            handles.append(module.register_forward_pre_hook(before_norm))
    try:
        network(example)
    finally:
        for handle in handles:
            handle.remove()
    readers = Counter(conv for conv, _ in found)
    return [pair for pair in found if calls[pair[0]] == calls[pair[1]] == readers[pair[0]] == 1]
