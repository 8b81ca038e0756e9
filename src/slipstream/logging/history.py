"""A bounded history of one scalar, with statistics over its most recent entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from slipstream.errors import CheckpointError, ConfigError, DataError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    import numpy.typing as npt

Number = int | float
_N = TypeVar("_N", int, Number)

# Large enough for the averages in log lines, small enough to store in every checkpoint.
_SAVED_ENTRIES = 1_000


class HistoryBuffer:
    """The most recent values of one scalar, each with the number of samples that it represents.

    Args:
        log_history: initial values, oldest first.
        count_history: number of samples that each initial value represents.
        max_length: maximum number of entries; older entries are dropped.

    Raises:
        ConfigError: if the two histories differ in length.

    Example:
        >>> history = HistoryBuffer()
        >>> for loss in (4.0, 2.0, 1.0):
        ...     history.update(loss)
        >>> history.mean(window_size=2)
        1.5
    """

    _statistics: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self,
        log_history: Iterable[Number] = (),
        count_history: Iterable[int] = (),
        max_length: int = 10_000,
    ) -> None:
        values, counts = list(log_history), list(count_history)
        if len(values) != len(counts):
            raise ConfigError("log_history and count_history must have the same length")
        self.max_length = max_length
        # Whether log lines show the mean of the most recent values if the scalar's name matches the log processor's
        # `mean_pattern`. False for evaluation metrics, because each value is the result of a complete evaluation.
        self.averaged = True
        self._values: deque[Number] = deque(maxlen=max_length)
        self._counts: deque[int] = deque(maxlen=max_length)
        # Number of values appended to this object, including dropped values. `load_state_dict` does not change it.
        self.total = 0
        for value, count in zip(values, counts, strict=True):
            self.update(value, count)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        newest = f", newest={self._values[-1]}" if self._values else ""
        return f"HistoryBuffer(entries={len(self)}{newest})"

    def update(self, log_val: Number, count: int = 1) -> None:
        """Append a value that represents `count` samples, in constant time."""
        self.total += 1
        self._values.append(log_val)
        self._counts.append(count)

    @property
    def data(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The stored values and their counts, oldest first, as two arrays of the same length."""
        return np.array(self._values), np.array(self._counts, dtype=np.int64)

    @classmethod
    def register_statistics(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Register `method(history, ...)` under its name for use in `statistics`; can be used as a decorator."""
        cls._statistics[method.__name__] = method
        return method

    @classmethod
    def find_statistics(cls, method_name: str) -> Callable[..., Any]:
        """Return the registered function `method_name`.

        Raises:
            UnknownNameError: if no function with this name is registered.
        """
        if method_name not in cls._statistics:
            raise UnknownNameError(
                f"unknown statistic {method_name!r}{did_you_mean(method_name, cls._statistics)}"
            )
        return cls._statistics[method_name]

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the statistic `method_name`, computed with the given arguments."""
        return self.find_statistics(method_name)(self, *args, **kwargs)

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the last `window_size` values (None: all values), weighted by their counts."""
        counts = list(self._newest(self._counts, window_size))
        products = (v * c for v, c in zip(self._newest(self._values, window_size), counts, strict=True))
        return sum(products) / sum(counts)

    def min(self, window_size: int | None = None) -> Number:
        """Return the smallest of the last `window_size` values (None: all values)."""
        return min(self._newest(self._values, window_size))

    def max(self, window_size: int | None = None) -> Number:
        """Return the largest of the last `window_size` values (None: all values)."""
        return max(self._newest(self._values, window_size))

    def newest(self, count: int) -> list[Number]:
        """Return the last `count` stored values, newest first."""
        return list(islice(reversed(self._values), max(count, 0)))

    def current(self) -> Number:
        """Return the latest value."""
        return next(self._newest(self._values, 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the last 1,000 entries as plain lists, which `torch.load(weights_only=True)` can read."""
        return {
            "log_history": list(self._values)[-_SAVED_ENTRIES:],
            "count_history": list(self._counts)[-_SAVED_ENTRIES:],
            "max_length": self.max_length,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history with a saved history.

        Raises:
            CheckpointError: if `state_dict` was not returned by `HistoryBuffer.state_dict`.
        """
        try:
            loaded = HistoryBuffer(**state_dict)
        except (TypeError, ConfigError) as error:
            raise CheckpointError(f"the state dict is not a saved HistoryBuffer: {error}") from error
        self.max_length, self._values, self._counts = loaded.max_length, loaded._values, loaded._counts

    def _newest(self, entries: deque[_N], window_size: int | None) -> Iterator[_N]:
        if not entries:
            raise DataError("the history is empty; call update() before computing statistics")
        return islice(reversed(entries), window_size)


for _method in (HistoryBuffer.mean, HistoryBuffer.min, HistoryBuffer.max, HistoryBuffer.current):
    HistoryBuffer.register_statistics(_method)
