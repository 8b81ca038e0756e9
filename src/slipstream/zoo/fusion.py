"""Fuse convolutions with the BatchNorm layers that follow them, for inference."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_leaves

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


# Maximum accepted change in a float32 output, relative to the largest absolute value of that output.
_TOLERANCE = 1e-3


@torch.no_grad()
def fuse_batch_norms(network: nn.Module, example: Tensor) -> int:
    """Fuse each convolution with the BatchNorm that follows it, in place, and return the number of fused pairs.

    A convolution and a BatchNorm form a pair if a forward pass calls each of them once and the BatchNorm receives the
    unchanged output of the convolution. Each fused BatchNorm is replaced with the identity. Outputs in evaluation mode
    remain the same up to rounding. A pair is not fused if fusing it changes the outputs for a random input, as in
    `norm(y) + y`, where `y` is the output of the convolution. Afterwards, the network is in evaluation mode.

    Args:
        network: the network.
        example: an example input for the network.
    """
    network.eval()
    modules = _pairs(network, example)
    names = {module: name for name, module in network.named_modules()}
    pairs = [(names[conv], names[norm]) for conv, norm in modules]
    if not _keeps_outputs(network, pairs, example.shape):
        pairs = [pair for pair in pairs if _keeps_outputs(network, [pair], example.shape)]
    for pair in pairs:
        _fuse(network, *pair)
    return len(pairs)


def _fuse(network: nn.Module, conv: str, norm: str) -> None:
    replaced: Any = network.get_submodule(conv)
    statistics: Any = network.get_submodule(norm)
    fused: Any = fuse_conv_bn_eval(replaced, statistics, isinstance(replaced, _TRANSPOSED))
    network.set_submodule(conv, fused)
    network.set_submodule(norm, nn.Identity())


def _keeps_outputs(network: nn.Module, pairs: Sequence[tuple[str, str]], shape: Sequence[int]) -> bool:
    """Return whether fusing the pairs keeps the outputs for a random input, in float32 on the CPU."""
    trial = copy.deepcopy(network).to("cpu", torch.float32)
    example = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    expected = tree_leaves(trial(example))
    for pair in pairs:
        _fuse(trial, *pair)
    return all(
        torch.allclose(output, reference, rtol=0, atol=_TOLERANCE * float(reference.abs().amax()))
        for output, reference in zip(tree_leaves(trial(example)), expected, strict=True)
    )


def _pairs(network: nn.Module, example: Tensor) -> list[tuple[Any, Any]]:
    calls: Counter[nn.Module] = Counter()
    found: list[tuple[nn.Module, nn.Module]] = []
    # Keep the outputs alive so that their ids stay unique. An in-place operation changes an output's version.
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
