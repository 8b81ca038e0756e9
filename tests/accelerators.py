"""The accelerator used by the tests marked `gpu`: a CUDA device, or a device such as the simulated NPU (`make npu`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
"""The CPU if there is no accelerator. In this case, the tests marked `gpu` are skipped."""
BACKEND = "aot_eager" if DEVICE.type == "npu" else "inductor"
"""A compiler backend that supports the device. Inductor has no code generator for the simulated NPU."""
IS_CUDA = DEVICE.type == "cuda"
cuda_only = pytest.mark.skipif(not IS_CUDA, reason="requires a CUDA device")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail if the host waits for the device inside the context."""
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        torch_npu = pytest.importorskip("torch_npu", reason="this device does not report host waits")
        with torch_npu.watching((*torch_npu.HOST_READS, "host_to_device_blocking")) as seen:
            yield
        assert not seen, seen
