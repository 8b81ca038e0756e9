"""Cache compiled code in a folder that only the user can write to."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.cores import cpu_features
from slipstream.errors import ConfigError
from slipstream.files import user_cache
from slipstream.version import __version__

__all__ = ["cache_folder", "use_cache"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_cache(cache: bool | str, warn: Callable[[str], None]) -> Path | None:
    """Set inductor's cache folder for this process, and return it.

    Call this function before any compilation. It sets the TORCHINDUCTOR_CACHE_DIR environment variable. It does nothing
    and returns None if the user has set the variable, or if `cache` is False. The keys of torch's cache are hashes of
    the graph and the options, so models can share the folder.

    Args:
        cache: a folder, or True for the user's cache folder (SLIPSTREAM_CACHE, XDG_CACHE_HOME/slipstream,
            ~/.cache/slipstream); False for none.
        warn: called if the user's cache folder cannot be used; torch's default folder is then used instead.

    Raises:
        ConfigError: the folder `cache` is not writable, or is writable by other users.
    """
    if cache is False:
        return None
    folder = cache_folder(cache)
    if _is_set_by_user(folder.name):
        return None
    try:
        _create(folder)
    except (OSError, ConfigError) as error:
        if isinstance(cache, str):
            raise ConfigError(str(error), "compile.cache") from error
        warn(
            f"compiled code is cached in torch's default folder, because Slipstream's folder cannot be used: {error}. "
            "Set SLIPSTREAM_CACHE to a different folder"
        )
        return None
    os.environ[_VARIABLE] = str(folder)
    return folder


def cache_folder(cache: bool | str) -> Path:
    """Return the cache folder for the CPU (for which inductor generates code) and the versions, without creating it."""
    base = Path(cache).expanduser().absolute() if isinstance(cache, str) else user_cache("compile")
    versions = torch.__version__, __version__, platform.python_version()
    key = repr((*versions, platform.machine(), cpu_features()))
    return base / f"torch-{torch.__version__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _is_set_by_user(name: str) -> bool:
    """Return whether the user, rather than torch or an earlier run with a folder of this name, set the variable."""
    value = os.environ.get(_VARIABLE)
    if not value or Path(value).name == name:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(value).resolve() != Path(default_cache_dir()).resolve()


def _create(folder: Path) -> None:
    """Create the folder, and check that only this user can write to it, because the code in it is executed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        raise ConfigError(
            f"{folder} belongs to another user or is writable by other users; refusing to load compiled code from it. "
            f"Choose a folder that you own, and run: chmod 700 {folder}"
        )
