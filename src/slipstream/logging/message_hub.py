"""Scalar histories and other values shared by the components of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from slipstream.errors import CheckpointError, DataError, UnknownNameError, did_you_mean
from slipstream.logging.history import HistoryBuffer, Number
from slipstream.logging.instances import Named, instances_by_name
from slipstream.plain_values import plain


class MessageHub(Named):
    """The scalars of one Runner, such as `train/loss`, and its runtime values, such as `eta`.

    Args:
        name: name of the run.
    """

    instances = instances_by_name("slipstream_hubs")

    def __init__(self, name: str) -> None:
        self.name = name
        self._scalars: dict[str, HistoryBuffer] = {}
        self._infos: dict[str, Any] = {}
        self._resumed: dict[str, bool] = {}
        self._warned: set[str] = set()  # runtime values for which `state_dict` has warned

    def __repr__(self) -> str:
        return f"MessageHub({self.name!r}, scalars={sorted(self._scalars)}, infos={sorted(self._infos)})"

    @property
    def log_scalars(self) -> Mapping[str, HistoryBuffer]:
        """The history of every scalar, by key; read-only."""
        return MappingProxyType(self._scalars)

    @property
    def runtime_info(self) -> Mapping[str, Any]:
        """The runtime values by key; read-only."""
        return MappingProxyType(self._infos)

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Append a number to the history of `key`.

        Args:
            key: the scalar's name, prefixed with the mode, such as `train/loss`.
            value: a number, or an array or tensor with one element. A tensor on an accelerator causes a
                synchronization; `Meter` avoids this.
            count: number of samples that the value represents.
            resumed: whether checkpoints contain the history.

        Raises:
            DataError: if `value` is not a single number.
        """
        history = self._scalars.get(key)
        number = value if type(value) is float else _number(key, value)
        if history is None:
            history = self._scalars[key] = HistoryBuffer()
        self._resumed[key] = resumed
        history.update(number, count)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Append a value to each of several scalars; a value may also be `dict(value=..., count=...)`."""
        for key, value in log_dict.items():
            if not isinstance(value, Mapping):
                self.update_scalar(key, value, resumed=resumed)
            elif "value" in value:
                self.update_scalar(key, value["value"], value.get("count", 1), resumed)
            else:
                raise DataError(f"the dict for the scalar '{key}' must have a 'value' key, but is {value!r}")

    def update_metric(self, key: str, value: Any) -> None:
        """Append an evaluation result; log lines show the latest result, not the mean of several results."""
        self.update_scalar(key, value)
        self._scalars[key].averaged = False

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set a runtime value of any type.

        If `resumed` is True, checkpoints include the value. They contain only tensors and built-in Python values: NumPy
        scalars are converted to numbers, arrays to tensors, sets to lists, paths to strings, and instances of
        subclasses to their built-in base types. A value that is or contains an object of another type is omitted, and
        a warning is issued.
        """
        self._infos[key] = value
        self._resumed[key] = resumed

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several runtime values."""
        for key, value in info_dict.items():
            self.update_info(key, value, resumed)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove and return the runtime value `key`, or return `default` if it is not set."""
        return self._infos.pop(key, default)

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of `key`.

        Raises:
            UnknownNameError: if no scalar with this name is recorded.
        """
        if key not in self._scalars:
            raise UnknownNameError(
                f"the scalar '{key}' has not been recorded{did_you_mean(key, self._scalars)}"
            )
        return self._scalars[key]

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return the runtime value `key`, or `default` if it is not set."""
        return self._infos.get(key, default)

    def state_dict(self, warn: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
        """Return the entries recorded with `resumed=True`, in a form that `torch.load(weights_only=True)` can read.

        Args:
            warn: called with a message for each value that must be omitted (see `update_info`), once per key.
        """
        return {
            "log_scalars": {key: h.state_dict() for key, h in self._scalars.items() if self._resumed[key]},
            "runtime_info": self._saved_infos(warn),
            "resumed_keys": {},  # MMEngine requires this entry to resume from the checkpoint
        }

    def _saved_infos(self, warn: Callable[[str], None] | None) -> dict[str, Any]:
        """Return the runtime values that can be saved completely."""
        saved: dict[str, Any] = {}
        for key, value in self._infos.items():
            if not self._resumed[key]:
                continue
            messages: list[str] = []
            # The tensors are copied when the checkpoint is written.
            converted = plain(
                {key: value}, messages.append, "message_hub.runtime_info", lambda _, tensor: tensor
            )
            if not messages:
                saved |= converted
            elif warn is not None and key not in self._warned:
                self._warned.add(key)
                for message in messages:
                    warn(message)
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load saved scalars and runtime values; entries with other keys are kept.

        Raises:
            CheckpointError: if `state_dict` was not returned by `MessageHub.state_dict`.
        """
        try:
            saved, infos = dict(state_dict["log_scalars"]), dict(state_dict["runtime_info"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the state dict has no 'log_scalars' or 'runtime_info' of a MessageHub"
            ) from error
        histories = {key: HistoryBuffer() for key in saved}
        for key, history in histories.items():
            history.load_state_dict(saved[key])
        self._scalars.update(histories)
        self._infos.update(infos)
        self._resumed.update(dict.fromkeys([*histories, *infos], True))

    @classmethod
    def get_instance(cls, name: str) -> MessageHub:
        """Return this context's hub named `name`; the first call creates it. A run's hub is named after the run."""
        if name not in cls.instances.get():
            cls(name).make_current()
        return cls.instances.get()[name]

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether this context has a hub named `name`."""
        return name in cls.instances.get()

    @classmethod
    def get_current_instance(cls) -> MessageHub:
        """Return the active Runner's hub or, if no Runner is active in this context, the newest hub.

        If this context has no hub, create one.
        """
        for hub in reversed(list(cls.instances.get().values())):
            return hub
        return cls.get_instance("slipstream")


def _number(key: str, value: Any) -> Number:
    if isinstance(value, bool | int | float):
        return float(value) if isinstance(value, float) else int(value)
    try:
        return _number(key, value.item())
    except (AttributeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the scalar '{key}' must be a single number, not a {type(value).__name__}"
        ) from error
