"""`BaseDataset`, the base class of OpenMMLab datasets, and `Compose`."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from slipstream.config import Config
from slipstream.errors import DataError
from slipstream.logging import print_log
from slipstream.openmmlab.mmengine.fileio import join_path, list_from_file, load
from slipstream.openmmlab.mmengine.registry import TRANSFORMS
from slipstream.openmmlab.mmengine.utils import is_abs

__all__ = ["BaseDataset", "Compose", "force_full_init"]

Indices = int | Sequence[int]


class Compose:
    """Call several transforms in order; a transform that returns None ends the sequence.

    Args:
        transforms: callables or transform configurations.
    """

    def __init__(self, transforms: Sequence[dict[str, Any] | Callable[[Any], Any]] | None) -> None:
        self.transforms: list[Callable[[Any], Any]] = []
        for transform in transforms or ():
            built = TRANSFORMS.build(transform) if isinstance(transform, dict) else transform
            if not callable(built):
                raise TypeError(f"a transform must be a callable or a dict, not {type(built)}")
            self.transforms.append(built)

    def __call__(self, data: Any) -> Any:
        """Return the transformed sample, or None if a transform returns None."""
        for transform in self.transforms:
            data = transform(data)
            if data is None:
                return None
        return data

    def __repr__(self) -> str:
        lines = "".join(f"\n    {transform}" for transform in self.transforms)
        return f"{type(self).__name__}({lines}\n)"


def force_full_init(old_func: Callable[..., Any]) -> Any:
    """Decorate a dataset method so that it first calls `full_init` if the dataset is not initialized."""

    @functools.wraps(old_func)
    def wrapper(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(obj, "full_init"):
            raise AttributeError(f"{type(obj).__name__} does not define full_init; add this method")
        if not getattr(obj, "_fully_initialized", False):
            print_log(
                f"{type(obj).__name__} is not initialized; initializing it before the call to {old_func.__name__}",
                "current",
                logging.WARNING,
            )
            obj.full_init()
            obj._fully_initialized = True
        return old_func(obj, *args, **kwargs)

    return wrapper


class _PackedSamples:
    """Pickled sample descriptions in one byte array, which forked worker processes share without copying."""

    def __init__(self, samples: Sequence[bytes]) -> None:
        self.data = np.frombuffer(b"".join(samples), dtype=np.uint8)
        self.ends: npt.NDArray[np.int64] = np.cumsum([len(sample) for sample in samples], dtype=np.int64)


class BaseDataset(Dataset[Any]):
    """A dataset whose samples are described by dicts and loaded by a pipeline of transforms.

    Subclasses override `load_data_list`, or `parse_data_info` for annotation files in the OpenMMLab format
    (`dict(metainfo=..., data_list=[...])`).

    Args:
        ann_file: annotation file, relative to `data_root`.
        metainfo: entries that override those in the `METAINFO` class attribute; a string value is the path to a file
            with one item per line or, if the file does not exist, the value itself.
        data_root: root folder.
        data_prefix: maps sample keys to folders. Each folder, relative to `data_root`, is prepended to the path
            stored under its key.
        filter_cfg: options for the `filter_data` method of a subclass.
        indices: use only these samples; an int n selects the first n samples, or the last -n samples if it is negative.
        serialize_data: store the descriptions in one byte array.
        pipeline: transforms or their configurations.
        test_mode: raise an error if the pipeline returns None, instead of drawing a different sample.
        lazy_init: load the annotations only when `full_init` is called.
        max_refetch: maximum number of other samples to draw if the pipeline returns None.
    """

    METAINFO: ClassVar[dict[str, Any]] = {}
    _fully_initialized = False

    def __init__(
        self,
        ann_file: str | None = "",
        metainfo: Mapping[str, Any] | None = None,
        data_root: str | None = "",
        data_prefix: Mapping[str, Any] | None = None,
        filter_cfg: dict[str, Any] | None = None,
        indices: Indices | None = None,
        serialize_data: bool = True,
        pipeline: Sequence[dict[str, Any] | Callable[[Any], Any]] = (),
        test_mode: bool = False,
        lazy_init: bool = False,
        max_refetch: int = 1000,
    ) -> None:
        self.ann_file = ann_file
        self._metainfo = self._load_metainfo(copy.deepcopy(metainfo))
        self.data_root = data_root
        self.data_prefix: dict[str, Any] = dict({"img_path": ""} if data_prefix is None else data_prefix)
        self.filter_cfg = copy.deepcopy(filter_cfg)
        self._indices = indices
        self.serialize_data = serialize_data
        self.test_mode = test_mode
        self.max_refetch = max_refetch
        self.data_list: list[Any] = []
        self.data_bytes: npt.NDArray[np.uint8]
        self.data_address: npt.NDArray[np.int64]
        self._join_prefix()
        self.pipeline = Compose(pipeline)
        if not lazy_init:
            self.full_init()

    # ---- load the annotations --------------------------------------------------------------------------

    def full_init(self) -> None:
        """Load, filter and select the sample descriptions. Further calls have no effect."""
        if self._fully_initialized:
            return
        self.data_list = self.load_data_list()
        self.data_list = self.filter_data()
        if self._indices is not None:
            self.data_list = self._get_unserialized_subset(self._indices)
        if self.serialize_data:
            self.data_bytes, self.data_address = self._serialize_data()
        self._fully_initialized = True

    def load_data_list(self) -> list[dict[str, Any]]:
        """Return the descriptions in the annotation file, and add those entries of its metainfo that are not set.

        Raises:
            DataError: if the file is not in the OpenMMLab format, or `parse_data_info` returns neither a dict nor
                a list of dicts.
        """
        annotations = load(self.ann_file)
        if not isinstance(annotations, dict) or not {"data_list", "metainfo"} <= set(annotations):
            raise DataError(f"{self.ann_file} must contain a dict with the keys 'metainfo' and 'data_list'")
        for key, value in annotations["metainfo"].items():
            self._metainfo.setdefault(key, value)
        samples: list[dict[str, Any]] = []
        for raw in annotations["data_list"]:
            parsed = self.parse_data_info(raw)
            parts = parsed if isinstance(parsed, list) else [parsed]
            if not all(isinstance(part, dict) for part in parts):
                raise DataError(f"parse_data_info must return a dict or a list of dicts, not {parsed!r}")
            samples += parts
        return samples

    def parse_data_info(self, raw_data_info: dict[str, Any]) -> Any:
        """Return the description of a sample with the `data_prefix` folders prepended to its paths."""
        for key, prefix in self.data_prefix.items():
            if key not in raw_data_info:
                raise DataError(
                    f"data_prefix contains '{key}', but the sample {raw_data_info} does not; "
                    "remove the key from data_prefix, or override parse_data_info"
                )
            raw_data_info[key] = join_path(prefix, raw_data_info[key])
        return raw_data_info

    def filter_data(self) -> list[Any]:
        """Return the descriptions of the samples to keep. By default, all samples are kept."""
        return self.data_list

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the categories of a sample, for `ClassBalancedDataset`."""
        raise NotImplementedError(f"{type(self).__name__} must define get_cat_ids")

    @classmethod
    def _load_metainfo(cls, metainfo: Mapping[str, Any] | None = None) -> dict[str, Any]:
        merged = copy.deepcopy(cls.METAINFO)
        if metainfo is None:
            return merged
        if not isinstance(metainfo, Mapping | Config):
            raise TypeError(f"metainfo must be a dict, not {type(metainfo)}")
        for key, value in metainfo.items():
            merged[key] = _lines_or_text(value) if isinstance(value, str) else value
        return merged

    def _join_prefix(self) -> None:
        if self.ann_file and not is_abs(self.ann_file) and self.data_root:
            self.ann_file = join_path(self.data_root, self.ann_file)
        for key, prefix in self.data_prefix.items():
            if not isinstance(prefix, str):
                raise TypeError(f"data_prefix['{key}'] must be a string, not {type(prefix)}")
            if not is_abs(prefix) and self.data_root:
                self.data_prefix[key] = join_path(self.data_root, prefix)

    # ---- samples ---------------------------------------------------------------------------------------

    @property
    def metainfo(self) -> dict[str, Any]:
        """A copy of the metainfo."""
        return copy.deepcopy(self._metainfo)

    @force_full_init
    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return a copy of a sample's description, with its index as `sample_idx`."""
        if self.serialize_data:
            info = pickle.loads(self.data_bytes[self._span(idx)].tobytes())
        else:
            info = copy.deepcopy(self.data_list[idx])
        info["sample_idx"] = int(idx) if idx >= 0 else len(self) + int(idx)
        return info  # type: ignore[no-any-return]

    def prepare_data(self, idx: int) -> Any:
        """Return the output of the pipeline for a sample, or None if a transform returns None."""
        return self.pipeline(self.get_data_info(idx))

    def __getitem__(self, idx: int) -> Any:
        if not self._fully_initialized:
            self.full_init()
        for _ in range(1 if self.test_mode else self.max_refetch + 1):
            if (data := self.prepare_data(idx)) is not None:
                return data
            if self.test_mode:
                raise DataError(
                    f"the pipeline returned None for sample {idx}, which is not allowed with "
                    "test_mode=True; correct the pipeline"
                )
            idx = self._rand_another()
        raise DataError(
            f"the pipeline returned None {self.max_refetch + 1} times (max_refetch={self.max_refetch}); "
            "check the paths and the pipeline"
        )

    def _rand_another(self) -> int:
        return int(np.random.randint(0, len(self)))

    @force_full_init
    def __len__(self) -> int:
        return len(self.data_address if self.serialize_data else self.data_list)

    # ---- subsets ---------------------------------------------------------------------------------------

    @force_full_init
    def get_subset_(self, indices: Indices) -> None:
        """Keep only some of the samples; see the class documentation for `indices`."""
        if self.serialize_data:
            self.data_bytes, self.data_address = self._get_serialized_subset(indices)
        else:
            self.data_list = self._get_unserialized_subset(indices)

    @force_full_init
    def get_subset(self, indices: Indices) -> Self:
        """Return a dataset with some of the samples; see the class documentation for `indices`."""
        subset = self._copy_without_annotation()
        if self.serialize_data:
            subset.data_bytes, subset.data_address = self._get_serialized_subset(indices)
        else:
            subset.data_list = copy.deepcopy(self._get_unserialized_subset(indices))
        return subset

    def _span(self, idx: int) -> slice:
        position = range(len(self.data_address))[idx]
        return slice(
            int(self.data_address[position - 1]) if position else 0, int(self.data_address[position])
        )

    def _serialize_data(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        packed = _PackedSamples([pickle.dumps(sample, protocol=4) for sample in self.data_list])
        self.data_list.clear()
        return packed.data, packed.ends

    def _get_serialized_subset(self, indices: Indices) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        positions = _positions(indices, len(self.data_address))
        packed = _PackedSamples([self.data_bytes[self._span(position)].tobytes() for position in positions])
        return packed.data, packed.ends

    def _get_unserialized_subset(self, indices: Indices) -> list[Any]:
        return [self.data_list[position] for position in _positions(indices, len(self.data_list))]

    def _copy_without_annotation(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        for key, value in self.__dict__.items():
            if key not in ("data_list", "data_address", "data_bytes"):
                object.__setattr__(other, key, copy.deepcopy(value, memo))
        return other


def _positions(indices: Indices, length: int) -> Sequence[int]:
    """Return the positions that `indices` selects: the first or last samples for an int, or the items of a sequence."""
    if isinstance(indices, int):
        return range(length)[:indices] if indices >= 0 else range(length)[indices:]
    if not isinstance(indices, Sequence):
        raise TypeError(f"indices must be an int or a sequence of ints, not {type(indices)}")
    if outside := [index for index in indices if not -length <= index < length]:
        raise IndexError(f"indices out of range for {length} samples: {outside[:10]}")
    return [range(length)[index] for index in indices]


def _lines_or_text(value: str) -> Any:
    try:
        return list_from_file(value)
    except (TypeError, OSError):
        return value
