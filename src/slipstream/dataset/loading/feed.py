"""Option: batches that are already on the device when the step asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.errors import ConfigError

__all__ = ["CopyStream", "DeviceFeed", "draws_apart", "feed", "read_prefetch"]

_WITHOUT_STREAMS = ("cpu", "mps", "meta")


def read_prefetch(value: Any) -> int:
    """Read `prefetch`: how many batches are copied ahead; True is 2; None, False and 0 are none.

    Raises:
        ConfigError: anything else.
    """
    if value is None or isinstance(value, bool):
        return 2 if value else 0
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"must be a number of batches (such as 2), not {value!r}", "prefetch")
    return value


def feed(loader: Iterable[Any], device: torch.device | str | None = None, prefetch: int = 2) -> DeviceFeed:
    """Return `loader` as an iterable of batches on `device`; None is the accelerator, or the CPU without one."""
    return DeviceFeed(loader, device, read_prefetch(prefetch))


def draws_apart(loader: Any) -> bool:
    """Say whether drawing from `loader` leaves the process's random generators alone, so that it may be done ahead.

    Workers have generators of their own, and loaders of `build_dataloader` put the global ones back. An iterable
    data set without workers may draw from them: drawn ahead, a resumed run would see other numbers.
    """
    own = isinstance(getattr(loader, "batch_sampler", None), EpochBatchSampler)
    return own or getattr(loader, "num_workers", 0) > 0


class CopyStream(Protocol):
    """A way for batches to the device, beside the computation."""

    def send(self, batch: Any) -> Any:
        """Start to copy `batch`; return what `receive` takes."""

    def receive(self, sent: Any) -> Any:
        """Return the batch on the device, for whatever is launched from now on."""


class DeviceFeed:
    """A loader whose batches are on the device: while one is in use, `prefetch` more are copied beside the step.

    Tensors in dicts, lists, tuples and named tuples are moved as they are (uint8 stays uint8, a quarter of the
    bytes of float32: the data preprocessor converts on the device); anything else passes through. Order and
    random draws are the loader's own. Its error comes after the batches that were drawn before it. On the CPU
    batches are handed through as they are, and nothing is drawn ahead.

    On accelerators a side stream copies from pinned memory; what the loader does not pin itself (`pin_memory=True`),
    a thread pins for as long as an iteration lasts. The device holds `prefetch` + 1 batches.

    Args:
        loader: any iterable.
        device: where to; None is the accelerator, or the CPU without one.
        prefetch: batches ahead; 0 copies each when it is asked for.
        copy_stream: how batches travel, by default on a side stream where the device has streams.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        prefetch: int = 2,
        copy_stream: CopyStream | None = None,
    ) -> None:
        self.loader = loader
        self.device = _resolve(device)
        self.prefetch = prefetch
        self._copy_stream = copy_stream

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # its own TypeError says what has no length

    def __iter__(self) -> Iterator[Any]:
        return self.ahead(iter(self.loader))

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the rest of an iteration over the loader that has already begun, its batches on the device."""
        if self._copy_stream is None:
            if self.device.type == "cpu":
                return batches
            if self.prefetch == 0 or self.device.type in _WITHOUT_STREAMS:
                return (_move(batch, self.device) for batch in batches)
            self._copy_stream = _SideStream(self.device)
        if not getattr(self.loader, "pin_memory", False) and self.device.type not in _WITHOUT_STREAMS:
            batches = _pinned(batches, self.device)
        return _run_ahead(batches, self._copy_stream, self.prefetch)


def _run_ahead(batches: Iterator[Any], copy_stream: CopyStream, prefetch: int) -> Iterator[Any]:
    sent: deque[Any] = deque()
    failures: list[Exception] = []
    for batch in _until_failure(batches, failures):
        sent.append(copy_stream.send(batch))
        if len(sent) > prefetch:
            yield copy_stream.receive(sent.popleft())
    while sent:
        yield copy_stream.receive(sent.popleft())
    if failures:
        raise failures.pop()  # left in the list it would keep itself, and the loader, alive


def _until_failure(batches: Iterator[Any], failures: list[Exception]) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as failure:  # of the loader alone: what happens between two batches is not seen here
        failures.append(failure)


def _pinned(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches in pinned memory, one later than they are drawn: a thread copies in the meantime."""

    def at_device() -> None:  # a thread's first call would otherwise wake device 0
        torch.accelerator.set_device_index(device)

    with ThreadPoolExecutor(1, "slipstream-pin", at_device) as thread:
        pinning: Future[Any] | None = None
        for batch in batches:
            before, pinning = pinning, thread.submit(_pin, batch)
            if before is not None:
                yield before.result()
        if pinning is not None:
            yield pinning.result()


class _SideStream:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.Event]:
        """Start to copy `batch`; return it with the event of its arrival."""
        # The copy may take the memory of a batch that its last step has let go but not finished: wait for the steps
        # launched so far, on the device. (`record_stream` would keep that memory from use for as long as the host
        # runs ahead, up to a log interval's batches.) The copy then runs beside the step that is launched next.
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            moved = _move(batch, self.device)
        return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.Event]) -> Any:
        """Let the current stream wait for the batch's arrival; the host does not."""
        moved, arrival = sent
        torch.accelerator.current_stream(self.device).wait_event(arrival)
        return moved


def _move(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def _pin(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor, batch)


def _resolve(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    found = torch.device(device)
    index: int | None = found.index  # None for "cuda", whatever torch's own annotation says
    if index is not None or found.type in _WITHOUT_STREAMS:
        return found
    return torch.device(found.type, torch.accelerator.current_device_index())
