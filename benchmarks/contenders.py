"""The contenders of `slipstream bench` that `overhead.py` measures, keyed by the names used in its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from slipstream.cli.peers import CONTENDERS as ALL_CONTENDERS
from slipstream.cli.peers import (
    Work,
    hand_written,
    with_slipstream,
    with_slipstream_accelerate,
    with_slipstream_trainer,
)

CONTENDERS: dict[str, tuple[str, Callable[[Work], None]]] = {
    name: (package, ALL_CONTENDERS[key])
    for name, package, key in (
        ("loop", "torch", "loop"),
        ("Accelerate", "accelerate", "accelerate"),
        ("Lightning", "lightning", "lightning"),
        ("MMEngine", "mmengine", "mmengine"),
        ("Slipstream", "slipstream", "slipstream"),
    )
} | {
    "Slipstream, accelerate": ("slipstream", with_slipstream_accelerate),
    "Slipstream, Trainer": ("slipstream", with_slipstream_trainer),
}
"""Maps each contender's name to the package that it requires and its training function."""


COMPILED: dict[str, Callable[[Work], None]] = {
    "loop": hand_written,
    "loop, torch.compile(model)": partial(hand_written, compiled=True),
    "Slipstream, one graph": partial(with_slipstream, speed={"compile": {"scope": "step", "cache": False}}),
}


def installed_contenders() -> dict[str, Callable[[Work], None]]:
    """Return the contenders whose packages are installed, and print which ones are skipped."""
    available = {}
    for name, (package, contender) in CONTENDERS.items():
        if find_spec(package) is None:
            print(f"skipping {name}: {package} is not installed (pip install -e '.[bench]')")
        else:
            available[name] = contender
    return available
