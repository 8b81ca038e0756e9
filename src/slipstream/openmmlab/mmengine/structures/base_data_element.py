"""`BaseDataElement`, a container for metainfo and data fields."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch

__all__ = ["BaseDataElement"]

_PRIVATE = ("_metainfo_fields", "_data_fields")


class BaseDataElement:
    """Attributes of a sample, divided into two groups: metainfo, such as `img_shape`, and data, such as labels.

    Setting an attribute sets a data field; `set_metainfo` sets metainfo. A name belongs to only one group. The tensor
    methods (`to`, `cpu`, `detach`, ...) return a new element with converted data.

    Args:
        metainfo: maps names to metainfo values, which are copied.
        **kwargs: the data fields by name.
    """

    def __init__(self, *, metainfo: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._metainfo_fields: set[str] = set()
        self._data_fields: set[str] = set()
        if metainfo is not None:
            self.set_metainfo(metainfo)
        if kwargs:
            self.set_data(kwargs)

    # ---- set fields ------------------------------------------------------------------------------------

    def set_metainfo(self, metainfo: dict[str, Any]) -> None:
        """Set metainfo fields to copies of the values."""
        assert isinstance(metainfo, dict), f"metainfo must be a dict, not {type(metainfo)}"
        for name, value in copy.deepcopy(metainfo).items():
            self.set_field(value, name, field_type="metainfo")

    def set_data(self, data: dict[str, Any]) -> None:
        """Set data fields. If the class defines a property for a field, the property's setter is called."""
        assert isinstance(data, dict), f"data must be a dict, not {type(data)}"
        for name, value in data.items():
            setattr(self, name, value)

    def set_field(self, value: Any, name: str, dtype: Any = None, field_type: str = "data") -> None:
        """Set one field. Classes that define properties call this method in their setters.

        Args:
            value: the value.
            name: the name of the field.
            dtype: the required type, or a tuple of accepted types.
            field_type: `data` or `metainfo`.

        Raises:
            AttributeError: if the name belongs to the other group.
        """
        assert field_type in ("metainfo", "data")
        if dtype is not None:
            assert isinstance(value, dtype), f"'{name}' must be of type {dtype}, not {type(value)}"
        own, other = self._metainfo_fields, self._data_fields
        if field_type == "data":
            own, other = other, own
        if name in other:
            other_type = "data" if field_type == "metainfo" else "metainfo"
            raise AttributeError(
                f"'{name}' cannot be set as {field_type}, because it is already a {other_type} field; "
                "use a different name"
            )
        own.add(name)
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PRIVATE:
            self.set_field(value, name)
        elif name in self.__dict__:
            raise AttributeError(f"'{name}' is a private attribute and cannot be changed")
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, item: str) -> None:
        if item in _PRIVATE:
            raise AttributeError(f"'{item}' is a private attribute and cannot be deleted")
        object.__delattr__(self, item)
        self._metainfo_fields.discard(item)
        self._data_fields.discard(item)

    __delitem__ = __delattr__

    def update(self, instance: BaseDataElement) -> None:
        """Copy the fields from another element to this one."""
        assert isinstance(instance, BaseDataElement), (
            f"update requires a BaseDataElement, not {type(instance)}"
        )
        self.set_metainfo(dict(instance.metainfo_items()))
        self.set_data(dict(instance.items()))

    def pop(self, *args: Any) -> Any:
        """Remove a field and return its value. If the field does not exist, return the default or raise KeyError."""
        assert 1 <= len(args) <= 2, "pop expects a name and an optional default"
        for fields in (self._metainfo_fields, self._data_fields):
            if args[0] in fields:
                fields.remove(args[0])
                return self.__dict__.pop(*args)
        if len(args) == 2:
            return args[1]
        raise KeyError(f"{args[0]} is neither a metainfo field nor a data field")

    # ---- read fields -----------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute `key`, or `default` if it does not exist."""
        return getattr(self, key, default)

    def __contains__(self, item: str) -> bool:
        return item in self._data_fields or item in self._metainfo_fields

    def keys(self) -> list[str]:
        """Return the names of the data fields, except `_name` fields that store the value of a `name` property."""
        hidden = {
            f"_{key}" for key in self._data_fields if isinstance(getattr(type(self), key, None), property)
        }
        return list(self._data_fields - hidden)

    def _batch_fields(self) -> dict[str, Any]:
        """Return the data that a compiled step receives, in a fixed order; see `slipstream.step.leaves`."""
        # Omit a property such as `name`, because its value is stored in the `_name` field.
        return {name: self.__dict__[name] for name in sorted(self._data_fields) if name in self.__dict__}

    def metainfo_keys(self) -> list[str]:
        """Return the names of the metainfo fields."""
        return list(self._metainfo_fields)

    def all_keys(self) -> list[str]:
        """Return the names of all fields, metainfo first."""
        return self.metainfo_keys() + self.keys()

    def values(self) -> list[Any]:
        """Return the values of the data fields."""
        return [getattr(self, key) for key in self.keys()]

    def metainfo_values(self) -> list[Any]:
        """Return the metainfo values."""
        return [getattr(self, key) for key in self.metainfo_keys()]

    def all_values(self) -> list[Any]:
        """Return all values, metainfo first."""
        return self.metainfo_values() + self.values()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the data fields as (name, value) pairs."""
        return ((key, getattr(self, key)) for key in self.keys())

    def metainfo_items(self) -> Iterator[tuple[str, Any]]:
        """Yield the metainfo fields as (name, value) pairs."""
        return ((key, getattr(self, key)) for key in self.metainfo_keys())

    def all_items(self) -> Iterator[tuple[str, Any]]:
        """Yield all fields as (name, value) pairs, metainfo first."""
        return ((key, getattr(self, key)) for key in self.all_keys())

    @property
    def metainfo(self) -> dict[str, Any]:
        """The metainfo as a new dict."""
        return dict(self.metainfo_items())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict; nested elements are also converted to dicts."""
        return {
            key: value.to_dict() if isinstance(value, BaseDataElement) else value
            for key, value in self.all_items()
        }

    # ---- copies ----------------------------------------------------------------------------------------

    def new(self, *, metainfo: dict[str, Any] | None = None, **kwargs: Any) -> Self:
        """Return a new element with the same fields. `metainfo` and `kwargs`, if given, each replace a whole group."""
        new = type(self)()
        new.set_metainfo(self.metainfo if metainfo is None else metainfo)
        new.set_data(kwargs or dict(self.items()))
        return new

    def clone(self) -> Self:
        """Return a new element with the same data and copies of the metainfo."""
        return self.new()

    def _map(self, convert: Callable[[Any], Any], kinds: tuple[type, ...] | None = None) -> Self:
        new = self.new()
        for key, value in self.items():
            if isinstance(value, kinds or (torch.Tensor, BaseDataElement)):
                new.set_data({key: convert(value)})
        return new

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Call `to` on all data values that have this method."""
        new = self.new()
        for key, value in self.items():
            if hasattr(value, "to"):
                new.set_data({key: value.to(*args, **kwargs)})
        return new

    def cpu(self) -> Self:
        """Move the tensors in the data fields to the CPU."""
        return self._map(lambda value: value.cpu())

    def cuda(self) -> Self:
        """Move the tensors in the data fields to the current CUDA device."""
        return self._map(lambda value: value.cuda())

    def npu(self) -> Self:
        """Move the tensors in the data fields to the current NPU."""
        return self._map(lambda value: value.npu())

    def detach(self) -> Self:
        """Detach the tensors in the data fields."""
        return self._map(lambda value: value.detach())

    def numpy(self) -> Self:
        """Convert the tensors in the data fields to NumPy arrays."""
        return self._map(lambda value: value.detach().cpu().numpy())

    def to_tensor(self) -> Self:
        """Convert the NumPy arrays in the data fields to tensors."""

        def convert(value: Any) -> Any:
            return torch.from_numpy(value) if isinstance(value, np.ndarray) else value.to_tensor()

        return self._map(convert, (np.ndarray, BaseDataElement))

    def __repr__(self) -> str:
        return _describe(self)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"\n{key}: {_indent(_describe(item))}" for key, item in value.items())
    if isinstance(value, BaseDataElement):
        meta, data = (_indent(_describe(dict(items))) for items in (value.metainfo_items(), value.items()))
        text = f"\n\n    META INFORMATION{meta}\n\n    DATA FIELDS{data}\n"
        return f"<{type(value).__name__}({text}) at {hex(id(value))}>"
    return repr(value)


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")
