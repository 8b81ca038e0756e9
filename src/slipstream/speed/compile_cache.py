"""Cache a run's compiled code in a folder that only the user can write to."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.cores import cpu_features
from slipstream.errors import ConfigError
from slipstream.files import user_cache
from slipstream.speed.compile import CompileOptions
from slipstream.version import __version__

__all__ = ["cache_folder", "set_cache_folder", "use_cache"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TAG = "CACHEDIR.TAG"  # marks the folder as a cache for backup programs; see bford.info/cachedir
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Slipstream caches compiled code in this folder. The folder may be deleted at any time.
"""


def use_cache(
    model: nn.Module, options: CompileOptions, plan: Any, warn: Callable[[str], None]
) -> Path | None:
    """Set inductor's cache folder for this run, and return it.

    Call this function before any compilation. It sets the TORCHINDUCTOR_CACHE_DIR environment variable for the whole
    process, so the most recent run determines the folder. This function does nothing and returns None if the user has
    set the variable, if `options` disables the cache, or if the backend is not inductor. The keys of torch's cache are
    hashes of the graph, the options and the versions, so torch does not load the code of a different graph.

    Args:
        model: the model, on its device.
        options: the options; `cache` is a folder, or True for the user's cache folder (SLIPSTREAM_CACHE,
            XDG_CACHE_HOME/slipstream, ~/.cache/slipstream).
        plan: other options that affect the compiled code; its `repr` is part of the folder's hash.
        warn: called if the user's cache folder cannot be used; torch's default folder is then used instead.

    Raises:
        ConfigError: the folder in `options.cache` is not writable, or is writable by other users.
    """
    if not options.cache or options.backend != "inductor" or _is_set_by_user():
        return None
    folder = cache_folder(model, options, plan)
    try:
        _create(folder)
    except (OSError, ConfigError) as error:
        if isinstance(options.cache, str):
            raise ConfigError(str(error), "compile.cache") from error
        warn(
            f"compiled code is cached in torch's default folder, because Slipstream's folder cannot be used: {error}. "
            "Set SLIPSTREAM_CACHE to a different folder"
        )
        return None
    os.environ[_VARIABLE] = str(folder)
    return folder


@contextmanager
def set_cache_folder(folder: str | None) -> Iterator[None]:
    """Set inductor's cache folder within the context, even if another run has changed it; None leaves it unchanged."""
    before = os.environ.get(_VARIABLE)
    if folder is None or folder == before:
        yield
        return
    os.environ[_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def cache_folder(model: nn.Module, options: CompileOptions, plan: Any) -> Path:
    """Return the cache folder for a model, a plan, this machine and the installed versions, without creating it.

    The folder depends on the shapes of the weights, but not on their values.
    """
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    ]
    versions = (torch.__version__, __version__, platform.python_version())
    # Remove memory addresses from the repr of functions, because they differ between processes.
    key = re.sub(r" at 0x[0-9a-f]+", "", repr((shapes, options, plan, versions, _machine(model))))
    name = f"{type(model).__name__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return (
        Path(options.cache).expanduser().absolute()
        if isinstance(options.cache, str)
        else user_cache("compile")
    ) / name


def _machine(model: nn.Module) -> str:
    """Return a description of the CPU and the accelerator. Inductor generates code for the exact CPU model."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    if tensor is not None and tensor.device.type == "cuda":
        accelerator = torch.cuda.get_device_name(tensor.device)
    else:
        accelerator = "cpu" if tensor is None else tensor.device.type
    return f"{accelerator} {platform.machine()} {cpu_features()}"


def _is_set_by_user() -> bool:
    """Return whether the user, rather than torch or an earlier run in this process, set the environment variable."""
    value = os.environ.get(_VARIABLE)
    if not value:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(value).resolve() != Path(default_cache_dir()).resolve() and not (Path(value) / _TAG).is_file()


def _create(folder: Path) -> None:
    """Create the folder, and check that only this user can write to it, because the code in it is executed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix":
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(
                f"{folder} belongs to another user; refusing to load compiled code from it. Choose a folder you own"
            )
        if status.st_mode & 0o022:
            raise ConfigError(
                f"{folder} is writable by other users; refusing to load compiled code from it. Run: chmod 700 {folder}"
            )
    (folder / _TAG).write_text(_TAG_TEXT, encoding="utf-8")
