"""Write checkpoints in a background thread while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.sharded import write_checkpoint
from slipstream.dist import get_world_size, is_main_process
from slipstream.plain_values import plain, preserve_ties
from slipstream.sharding import is_sharded, local_shard, with_local

_DEVICES_WITHOUT_EVENTS = ("cpu", "mps")


class BackgroundWriter:
    """Write one checkpoint at a time in a background thread, from copies of its tensors.

    The copies use as much host memory as the tensors. They are kept until `close` and reused for the next checkpoint,
    because allocating them takes longer than copying. Tensors that are sharded across accelerators are copied on their
    device; these copies are freed after the checkpoint has been written. With several processes, the threads
    communicate through their own gloo group.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None

    def write(
        self,
        checkpoint: Mapping[str, Any],
        path: Path,
        warn: Callable[[str], None],
        on_saved: Callable[[Path], None],
    ) -> None:
        """Wait until the previous checkpoint has been written, then copy `checkpoint` and start writing the copy.

        All ranks must call this method.

        Args:
            checkpoint: the values to write; see `write_checkpoint`.
            path: path of the checkpoint.
            warn: called with a message for each value that cannot be saved.
            on_saved: called on rank 0, in the background thread, with the path of the complete checkpoint.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """
        self.wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "slipstream-checkpoint")
            self._group = dist.new_group(backend="gloo") if get_world_size() > 1 else None
        content, copied = self._copy(checkpoint, warn if is_main_process() else lambda _: None)

        def run() -> None:
            for device, event in copied.items():
                # A new thread uses device 0 by default, and torch's shard writer waits only for the current device.
                torch.accelerator.set_device_index(device)
                event.synchronize()
            write_checkpoint(content, path, warn, group=self._group, on_saved=on_saved)

        self._writing = self._pool.submit(run)

    def wait(self) -> None:
        """Wait until the last checkpoint has been written.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait until the last checkpoint has been written, and free the copies."""
        try:
            self.wait()
        finally:
            self._buffers = {}
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _copy(
        self, checkpoint: Mapping[str, Any], warn: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[torch.device, torch.Event]]:
        """Return a copy of the checkpoint and, for each device, an event recorded after the device's copies."""
        buffers: dict[str, Tensor] = {}
        devices: set[torch.device] = set()

        def buffered(name: str, tensor: Tensor) -> Tensor:
            # Use `pop`, because different keys (1 and "1") can have the same name.
            buffers[name] = buffer = _buffer_for(tensor, self._buffers.pop(name, None))
            return buffer.copy_(tensor, non_blocking=_copies_asynchronously(tensor))

        def copy(name: str, tensor: Tensor) -> Tensor:
            if is_sharded(tensor) and tensor.device.type == "cpu":
                return with_local(tensor, buffered(name, local_shard(tensor)))
            if is_sharded(tensor):
                devices.add(tensor.device)
                return tensor.clone()
            if not is_main_process():  # only rank 0 writes this tensor
                return tensor
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                return tensor.cpu().clone()
            devices.add(tensor.device)
            return buffered(name, tensor)

        content = plain(checkpoint, warn, copy=preserve_ties(copy))
        self._buffers = buffers
        accelerators = [device for device in devices if device.type not in _DEVICES_WITHOUT_EVENTS]
        return content, {d: torch.accelerator.current_stream(d).record_event() for d in accelerators}


def _copies_asynchronously(tensor: Tensor) -> bool:
    return tensor.device.type not in _DEVICES_WITHOUT_EVENTS


def _buffer_for(tensor: Tensor, previous: Tensor | None) -> Tensor:
    """Return a host tensor with the layout of `tensor`: `previous` if it has this layout, otherwise a new tensor.

    A new tensor is in pinned memory if the device copies to it asynchronously.
    """
    layout = (tensor.shape, tensor.dtype, tensor.stride())
    if previous is not None and (previous.shape, previous.dtype, previous.stride()) == layout:
        return previous
    with torch.inference_mode(False):  # an inference tensor cannot be reused
        return torch.empty_like(tensor, device="cpu", pin_memory=_copies_asynchronously(tensor))
