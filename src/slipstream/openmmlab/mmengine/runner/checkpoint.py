"""MMEngine's functions for reading checkpoints and loading weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from slipstream.checkpoint import download_checkpoint, newest_checkpoints, revise
from slipstream.checkpoint import load_checkpoint as read_checkpoint
from slipstream.checkpoint import save_checkpoint as write_checkpoint
from slipstream.errors import CheckpointError
from slipstream.files import atomic_write
from slipstream.logging import print_log
from slipstream.model import unwrap_model

__all__ = [
    "CheckpointLoader",
    "_load_checkpoint",
    "_load_checkpoint_to_model",
    "find_latest_checkpoint",
    "get_state_dict",
    "load_checkpoint",
    "load_from_local",
    "load_state_dict",
    "save_checkpoint",
    "weights_to_cpu",
]

Loader = Callable[..., Any]


class CheckpointLoader:
    """Read each checkpoint with the loader registered for the longest matching prefix of its path."""

    _schemes: ClassVar[dict[str, Loader]] = {}

    @classmethod
    def register_scheme(
        cls, prefixes: str | Sequence[str], loader: Loader | None = None, force: bool = False
    ) -> Any:
        """Register `loader(filename, map_location)` for path prefixes. Can also be used as a decorator.

        Raises:
            CheckpointError: if a prefix is already registered and `force` is not set.
        """

        def register(function: Loader) -> Loader:
            for prefix in [prefixes] if isinstance(prefixes, str) else prefixes:
                if prefix in cls._schemes and not force:
                    raise CheckpointError(
                        f"the prefix '{prefix}' is already registered; set force=True to replace it"
                    )
                cls._schemes[prefix] = function
            return function

        return register if loader is None else register(loader)

    @classmethod
    def load_checkpoint(
        cls, filename: str, map_location: Any = None, logger: logging.Logger | str | None = "current"
    ) -> Any:
        """Return the contents of a checkpoint."""
        matching = (prefix for prefix in cls._schemes if str(filename).startswith(prefix))
        loader = cls._schemes[max(matching, key=len)]
        print_log(f"Loading {filename}", logger)
        return loader(filename, map_location=map_location)


@CheckpointLoader.register_scheme(prefixes="")
def load_from_local(filename: str, map_location: Any = None) -> Any:
    """Read a local checkpoint without executing code from it.

    Raises:
        FileNotFoundError: if the file does not exist.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint {path} does not exist; check the path")
    return read_checkpoint(path, "cpu" if map_location is None else map_location)


@CheckpointLoader.register_scheme(prefixes=("http://", "https://"))
def load_from_http(filename: str, map_location: Any = None) -> Any:
    """Download a checkpoint to the `torch.hub` cache, and read it without executing code from it."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    target = folder / filename.rsplit("/", 1)[-1]
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as temporary:
            download_checkpoint(filename, temporary)
    return load_from_local(str(target), map_location)


def _load_checkpoint(
    filename: str, map_location: Any = None, logger: logging.Logger | str | None = None
) -> Any:
    return CheckpointLoader.load_checkpoint(filename, map_location, logger)


def load_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = False,
    logger: logging.Logger | str | None = None,
) -> None:
    """Load weights into a module, which may be wrapped, and log the names of the weights that do not match.

    Raises:
        CheckpointError: if names or shapes do not match, and `strict` is set.
    """
    unwrapped: Any = unwrap_model(module)
    own_state = unwrapped.state_dict()
    mismatched = [
        k
        for k, v in state_dict.items()
        if k in own_state and hasattr(v, "shape") and v.shape != own_state[k].shape
    ]
    result = unwrapped.load_state_dict(
        {k: v for k, v in state_dict.items() if k not in mismatched}, strict=False
    )
    missing = [k for k in result.missing_keys if "num_batches_tracked" not in k and k not in mismatched]
    problems = {
        "different shapes": mismatched,
        "unexpected keys": list(result.unexpected_keys),
        "missing keys": missing,
    }
    text = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names)
    if text and strict:
        raise CheckpointError(
            f"the weights do not match the model: {text}; set strict=False to load only the matching weights"
        )
    if text:
        print_log(f"The weights do not match the model: {text}", logger, logging.WARNING)


def load_checkpoint(
    model: nn.Module,
    filename: str,
    map_location: Any = None,
    strict: bool = False,
    logger: logging.Logger | str | None = None,
    revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
) -> Any:
    """Load the weights from a checkpoint into a model, and return the checkpoint.

    Args:
        model: the model.
        filename: path or URL of the checkpoint.
        map_location: see `torch.load`.
        strict: raise an error if names or shapes do not match.
        logger: the logger; see `print_log`.
        revise_keys: pairs (pattern, replacement), applied to the names as in `re.sub`.
    """
    checkpoint = _load_checkpoint(filename, map_location, logger)
    return _load_checkpoint_to_model(model, checkpoint, strict, logger, revise_keys)


def _load_checkpoint_to_model(
    model: nn.Module,
    checkpoint: Mapping[str, Any],
    strict: bool = False,
    logger: logging.Logger | str | None = None,
    revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
) -> Mapping[str, Any]:
    load_state_dict(model, revise(checkpoint.get("state_dict", checkpoint), revise_keys), strict, logger)
    return checkpoint


def get_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the weights of a (possibly wrapped) module as CPU tensors."""
    return weights_to_cpu(unwrap_model(module).state_dict())


def weights_to_cpu(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state_dict` with all tensors on the CPU."""
    return {key: value.cpu() for key, value in state_dict.items()}


def save_checkpoint(
    checkpoint: Mapping[str, Any], filename: str, file_client_args: Any = None, backend_args: Any = None
) -> None:
    """Write a checkpoint to a local file atomically. Values that are neither tensors nor built-in types are omitted."""
    write_checkpoint(checkpoint, filename, lambda line: print_log(line, "current", logging.WARNING))


def find_latest_checkpoint(path: str) -> str | None:
    """Return the path of the newest checkpoint in a folder, or None if there is none."""
    found = next(newest_checkpoints(path), None)
    return str(found) if found else None
