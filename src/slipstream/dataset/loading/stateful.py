"""Loaders that save and restore their own position, and loaders of other libraries."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from slipstream.dist import get_world_size


class LoaderBatches(IterableDataset[Any]):
    """The batches of a loader that is not a `DataLoader`, as an iterable dataset. It has the loader's attributes."""

    def __init__(self, loader: Iterable[Any]) -> None:
        vars(self)["loader"] = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)


class LoaderState:
    """The position of a loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`.

    Loaders with an `order` are excluded, because a run can start at any of their batches.

    Args:
        loader: a loader returned by `build_dataloader`.
    """

    def __init__(self, loader: Any) -> None:
        passes_batches = loader.batch_size is None and loader.num_workers == 0
        sources = (loader, loader.dataset) if passes_batches else (loader,)
        self._source: Any = None
        for source in sources if getattr(loader, "order", None) is None else ():
            if all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict")):
                self._source = source
        # With several processes, the next batch is drawn before a batch is used.
        self._last_two: deque[bytes] = deque(maxlen=2)
        # Whether the next pass continues at the restored position.
        self.restored = False

    @property
    def exists(self) -> bool:
        """Whether the loader has a state."""
        return self._source is not None

    def record(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of a pass; with several processes, record the loader's states."""
        return self._recorded(batches) if self.exists and get_world_size() > 1 else iter(batches)

    def _recorded(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._record()
            yield batch
        self._record()

    def _record(self) -> None:
        # A serialized copy takes a fraction of the time of a deep copy.
        self._last_two.append(pickle.dumps(self._source.state_dict(), pickle.HIGHEST_PROTOCOL))

    def get(self, in_epoch: bool) -> dict[str, Any] | None:
        """Return the state after the batches that have been used, or None if the loader has no state.

        Args:
            in_epoch: False if the epoch has ended.
        """
        if self._last_two:
            state: dict[str, Any] = pickle.loads(self._last_two[0 if in_epoch else -1])
            return state
        return self._source.state_dict() if self.exists else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the result of `get`."""
        if self.exists and state is not None:
            self._source.load_state_dict(state)
            self.restored = True
