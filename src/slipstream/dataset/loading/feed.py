"""Speed option: copy the next batches to the device while the current step runs (`prefetch`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slipstream.dataset.loading.loader import order_of
from slipstream.dataset.loading.workers import prepared_workers
from slipstream.devices import default_device
from slipstream.errors import ConfigError

Batch = TypeVar("Batch")
_DEVICES_WITHOUT_STREAMS = ("cpu", "mps", "meta")


def read_prefetch(value: Any) -> int:
    """Convert a value of `prefetch` to the number of batches to copy ahead. True means 2; None and False mean 0.

    Raises:
        ConfigError: the value is not a bool, None or an int from 0 to 1024.
    """
    if value is None or isinstance(value, bool):
        return 2 if value else 0
    if not isinstance(value, int) or not 0 <= value <= 1024:
        raise ConfigError(f"must be a number of batches from 0 to 1024, not {value!r}", "prefetch")
    return value


def feed(
    loader: Iterable[Batch], device: torch.device | str | None = None, prefetch: int = 2
) -> DeviceFeed[Batch]:
    """Return an iterable of the batches of `loader` on `device`, which defaults to the accelerator or the CPU.

    The worker processes of a DataLoader ignore signals to the whole process group, so that the loop can save its state
    after such a signal (see `Preemption`). This does not apply to the start method `forkserver`, to workers that
    already run, or to a DataLoader inside another object, such as `zip(loader, other)`.
    """
    return DeviceFeed(loader, device, read_prefetch(prefetch))


def can_draw_ahead(loader: Any) -> bool:
    """Return whether drawing a batch from `loader` leaves the global random generators unchanged.

    Worker processes have separate generators, and loaders returned by `build_dataloader` restore the global state. An
    iterable dataset without workers may draw from the global generators, so drawing its batches early could change the
    random numbers of a resumed run.
    """
    return order_of(loader) is not None or getattr(loader, "num_workers", 0) > 0


class CopyStream(Protocol):
    """Interface for asynchronous copies to the device."""

    def send(self, batch: Any) -> Any:
        """Start copying `batch`, and return a handle for `receive`."""

    def receive(self, sent: Any) -> Any:
        """Return the batch on the device, ready for kernels that are launched afterwards."""


class DeviceFeed(Generic[Batch]):
    """A loader that copies its batches to the device, `prefetch` batches ahead of the current step.

    Tensors in dicts, lists, tuples and named tuples are moved without changing their dtype, so uint8 images need only a
    quarter of the bandwidth of float32 images; the data preprocessor converts them on the device. Other values are
    returned unchanged. The order of batches and the random numbers do not change. On the CPU, batches are returned
    unchanged and without prefetching.

    On accelerators with streams, a side stream copies from pinned memory. If the loader does not set `pin_memory=True`,
    a thread pins the batches. Up to `prefetch` + 2 batches are in device memory: the current batch and `prefetch` + 1
    later batches.

    Args:
        loader: any iterable.
        device: target device. Default: the accelerator if available, otherwise the CPU.
        prefetch: number of batches to copy ahead; 0 copies each batch on demand.
        copy_stream: object that copies the batches. Default: a side stream if the device supports streams.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str | None = None,
        prefetch: int = 2,
        copy_stream: CopyStream | None = None,
    ) -> None:
        self.loader = loader
        self.device = _resolve(device)
        self.prefetch = prefetch
        self._copy_stream = copy_stream

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises the loader's TypeError if it has no length

    def __iter__(self) -> Iterator[Batch]:
        with prepared_workers(self.loader):
            batches = iter(self.loader)
        return self.move_batches(batches)

    def move_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return an iterator that moves the rest of `batches`, an iterator over the loader, to the device."""
        if self._copy_stream is None:
            if self.device.type == "cpu":
                return batches
            if self.prefetch == 0 or self.device.type in _DEVICES_WITHOUT_STREAMS:
                return (_move(batch, self.device) for batch in batches)
            self._copy_stream = _SideStream(self.device)
        if not getattr(self.loader, "pin_memory", False) and self.device.type not in _DEVICES_WITHOUT_STREAMS:
            batches = _pin_batches(batches, self.device)
        return _run_ahead(batches, self._copy_stream, self.prefetch)


def _run_ahead(batches: Iterator[Any], copy_stream: CopyStream, prefetch: int) -> Iterator[Any]:
    sent: deque[Any] = deque()
    for batch in batches:
        sent.append(copy_stream.send(batch))
        if len(sent) > prefetch:
            yield copy_stream.receive(sent.popleft())
    while sent:
        yield copy_stream.receive(sent.popleft())


def _pin_batches(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches in pinned memory; a thread pins each batch while the next one is drawn."""
    # Without the initializer, the thread's first call would initialize device 0.
    with ThreadPoolExecutor(1, "slipstream-pin", torch.accelerator.set_device_index, (device,)) as thread:
        pinning: Future[Any] | None = None
        for batch in batches:
            previous, pinning = pinning, thread.submit(_pin, batch)
            if previous is not None:
                yield previous.result()
        if pinning is not None:
            yield pinning.result()


class _SideStream:
    """A `CopyStream` that copies batches on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.Event]:
        """Start copying `batch`, and return the copy and an event that marks its completion."""
        # The allocator may reuse the memory of a batch whose step has not finished on the device, so the copy waits
        # for all previously launched steps and overlaps with the next step. `record_stream` would delay the reuse of
        # that memory by up to one log interval, because the host runs ahead of the device.
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            moved = _move(batch, self.device)
        return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.Event]) -> Any:
        """Make the current stream wait for the copy; the host does not wait."""
        moved, copied = sent
        torch.accelerator.current_stream(self.device).wait_event(copied)
        return moved


def _move(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def _pin(batch: Any) -> Any:
    return tree_map_only(Tensor, _pin_tensor, batch)


def _pin_tensor(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu:
        return tensor
    # torch cannot pin an expanded tensor, whose elements share memory.
    expanded = tensor.layout == torch.strided and 0 in tensor.stride()
    return (tensor.contiguous() if expanded else tensor).pin_memory()


def _resolve(device: torch.device | str | None) -> torch.device:
    resolved = default_device() if device is None else torch.device(device)
    index: int | None = resolved.index  # None for "cuda"; torch annotates it as int
    if index is not None or resolved.type in _DEVICES_WITHOUT_STREAMS:
        return resolved
    return torch.device(resolved.type, torch.accelerator.current_device_index())
