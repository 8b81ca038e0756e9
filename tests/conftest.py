"""What every test shares: one thread a process, and global torch switches put back."""

import os
import tempfile
from collections.abc import Iterator

# Test processes run side by side; several threads each would wait for one another far longer than they
# compute. Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Compiled code of the tests is not kept in the user's cache, nor shared between two test runs.
os.environ.setdefault("SLIPSTREAM_CACHE", tempfile.mkdtemp(prefix="slipstream-tests-"))


@pytest.fixture(autouse=True)
def _quiet_torch() -> Iterator[None]:
    """Leave seeds alone, but put back the switches that a Runner may set."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
