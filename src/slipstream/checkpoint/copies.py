"""Copy tensors in host memory with several threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoint.threads import run_in_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["copy_in_threads"]

_CHUNK = 2**22
_MAX_THREADS = 8


def copy_in_threads(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first. Both must be in host memory and have the same shape and dtype.

    `Tensor.copy_` divides each tensor into one part per thread and waits for the slowest part. If other processes, such
    as loader workers, use the same cores, `copy_` takes several times as long as `run_in_threads`.
    """
    chunks: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for target, source in pairs:
        if source.nbytes < _CHUNK or not _same_bytes(target, source):
            target.copy_(source)
        else:
            chunks += zip(_chunks(target), _chunks(source), strict=True)
    extra_threads = max(min(torch.get_num_threads(), _MAX_THREADS) - 1, 0)
    with ThreadPoolExecutor(max(extra_threads, 1)) as pool:  # starts threads on demand
        run_in_threads(lambda pair: np.copyto(*pair), chunks, pool, extra_threads)


def _same_bytes(target: Tensor, source: Tensor) -> bool:
    """Return whether the tensors can be copied as bytes, that is, whether both are dense and have the same strides."""
    last_offset = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    is_lazy = source.is_conj() or source.is_neg() or source.is_quantized
    return not is_lazy and last_offset + 1 == source.numel() and target.stride() == source.stride()


def _chunks(tensor: Tensor) -> Iterator[Any]:
    content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return (content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK))
