"""Option: keep what torch.compile made for the next start, in a folder that nobody else can write to."""

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

from slipstream.errors import ConfigError
from slipstream.speed.compile import CompileOptions
from slipstream.version import __version__

__all__ = ["cache_folder", "folder_now", "use_cache"]

_TORCHS = "TORCHINDUCTOR_CACHE_DIR"
_TAG = "CACHEDIR.TAG"  # bford.info/cachedir: backups leave such folders out
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Compiled code of Slipstream. It may be deleted at any time.
"""


def use_cache(model: nn.Module, how: CompileOptions, plan: Any, warn: Callable[[str], None]) -> Path | None:
    """Let inductor keep its code in this run's folder, and return the folder.

    Call it before anything is compiled. The switch (the environment variable TORCHINDUCTOR_CACHE_DIR) is the process's:
    the last run's choice holds. If the variable is already set, its folder stays; None is returned then, and where
    `how` uses no cache or another backend. Torch finds code in the folder by its own hash of graph, options
    and versions, so code that does not fit is never loaded.

    Args:
        model: on its device.
        how: `cache` is a folder, or True for the user's (SLIPSTREAM_CACHE, XDG_CACHE_HOME/slipstream,
            ~/.cache/slipstream).
        plan: what else shapes the compiled code; its `repr` counts.
        warn: called if the user's folder cannot be used; torch's own is used then.

    Raises:
        ConfigError: the folder that `how.cache` names cannot be written, or others could put code there.
    """
    if not how.cache or how.backend != "inductor" or _chosen_by_user():
        return None
    folder = cache_folder(model, how, plan)
    try:
        _make(folder)
    except (OSError, ConfigError) as error:
        if isinstance(how.cache, str):
            raise ConfigError(str(error), "compile.cache") from error
        warn(f"compiled code is not kept for the next start: {error}. Set SLIPSTREAM_CACHE to another folder")
        return None
    os.environ[_TORCHS] = str(folder)
    return folder


@contextmanager
def folder_now(folder: str | None) -> Iterator[None]:
    """Let inductor use `folder` while this lasts, whatever another run has chosen since; None changes nothing."""
    before = os.environ.get(_TORCHS)
    if folder is None or folder == before:
        yield
        return
    os.environ[_TORCHS] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TORCHS]
        else:
            os.environ[_TORCHS] = before


def cache_folder(model: nn.Module, how: CompileOptions, plan: Any) -> Path:
    """Return the folder of this model, plan, machine and these versions; nothing is made.

    Weights do not count, their shapes do.
    """
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    ]
    versions = (torch.__version__, __version__, platform.python_version())
    # The repr of a function holds its address, which differs between starts.
    key = re.sub(r" at 0x[0-9a-f]+", "", repr((shapes, how, plan, versions, _machine(model))))
    name = f"{type(model).__name__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return (Path(how.cache).expanduser().absolute() if isinstance(how.cache, str) else _users()) / name


def _users() -> Path:
    own = os.environ.get("SLIPSTREAM_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "compile"
    # The standard has relative paths ignored.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "slipstream" / "compile"


def _machine(model: nn.Module) -> str:
    """Return what code is made for: inductor compiles for the very CPU it runs on, and home folders are shared."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    if tensor is not None and tensor.device.type == "cuda":
        accelerator = torch.cuda.get_device_name(tensor.device)
    else:
        accelerator = "cpu" if tensor is None else tensor.device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    features = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{accelerator} {platform.machine()} {sorted(features)}"


def _chosen_by_user() -> bool:
    """Say whether the variable names a folder that neither torch by itself nor an earlier run in this process chose."""
    given = os.environ.get(_TORCHS)
    if not given:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(given).resolve() != Path(default_cache_dir()).resolve() and not (Path(given) / _TAG).is_file()


def _make(folder: Path) -> None:
    """Make the folder, and check that only this user writes to it: what lies there is run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix":
        found = folder.stat()
        if found.st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user, whose code would be run")
        if found.st_mode & 0o022:
            raise ConfigError(
                f"others can write to {folder}, and their code would be run: chmod 700 {folder}"
            )
    (folder / _TAG).write_text(_TAG_TEXT, encoding="utf-8")
