"""Package versions."""

from __future__ import annotations

import re
import subprocess

__all__ = ["digit_version", "get_git_hash"]

_VERSION = re.compile(
    r"v?(\d+(?:\.\d+)*)(?:[._-]?(a|alpha|b|beta|rc|c|dev|post|rev|r)[._-]?(\d*))?", re.IGNORECASE
)
_RANKS = {
    "dev": -4,
    "a": -3,
    "alpha": -3,
    "b": -2,
    "beta": -2,
    "rc": -1,
    "c": -1,
    "post": 1,
    "rev": 1,
    "r": 1,
}


def digit_version(version_str: str, length: int = 4) -> tuple[int, ...]:
    """Convert a version to a tuple that sorts in version order. For example, `1.2rc1` becomes `(1, 2, 0, 0, -1, 1)`.

    Args:
        version_str: the version; a local part (`+cpu`) is ignored.
        length: number of components in the release part.
    """
    match = _VERSION.match(version_str.strip())
    assert match is not None, f"'{version_str}' is not a version such as '1.2.0'"
    release = [int(digit) for digit in match[1].split(".")][:length]
    release += [0] * (length - len(release))
    rank = _RANKS[match[2].lower()] if match[2] else 0
    number = int(match[3] or 0) if match[2] and rank != _RANKS["dev"] else 0
    return (*release, rank, number)


def get_git_hash(fallback: str = "unknown", digits: int | None = None) -> str:
    """Return the commit hash of the git repository in the working directory, or `fallback`."""
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return fallback
    return result.stdout.strip()[:digits]
