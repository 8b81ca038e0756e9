"""Common setup for all tests: one thread per process, and restored global torch settings."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

# Test processes run in parallel, so several threads per process would oversubscribe the cores. The variable is set
# before torch is imported, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from slipstream.logging import logger

# Tests do not use the user's cache of compiled code and do not share a cache with another test run.
# The processes that this process starts inherit the variable.
_own_cache = None if "SLIPSTREAM_CACHE" in os.environ else tempfile.mkdtemp(prefix="slipstream-tests-")
os.environ.setdefault("SLIPSTREAM_CACHE", _own_cache or "")


def pytest_unconfigure() -> None:
    """Remove the cache if this process has created it."""
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _handle_interrupts() -> None:
    """Handle SIGINT even if the tests were started in the background.

    Shells start background processes with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _freeze_objects() -> None:
    """Exclude the objects of imported modules from garbage collection, because traversing them slows down the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    """Restore the global torch settings that a Runner may change, except seeds."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(autouse=True)
def _forget_current_loggers() -> Iterator[None]:
    """Print messages without a Runner to stderr again, because a test may have made its logger current."""
    yield
    logger.MMLogger.instances.set({})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` if there is no accelerator."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="requires an accelerator"))
