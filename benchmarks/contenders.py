"""The contenders from `slipstream.compare` that `overhead.py` measures, keyed by the names used in its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from slipstream.compare import CONTENDERS as ALL_CONTENDERS
from slipstream.compare import Work
from slipstream.compare.contenders import compiled_loop, hand_written, with_slipstream

CONTENDERS: dict[str, tuple[str, Callable[[Work], float]]] = {
    name: (ALL_CONTENDERS[key].package, ALL_CONTENDERS[key].train)
    for name, key in {
        "loop": "loop",
        "Accelerate": "accelerate",
        "Lightning": "lightning",
        "MMEngine": "mmengine",
        "Slipstream": "slipstream",
    }.items()
}
"""Maps each contender's name to the package that it requires and its training function."""


COMPILED: dict[str, Callable[[Work], float]] = {
    "loop": hand_written,
    "loop, torch.compile(model)": compiled_loop,
    "Slipstream, one graph": partial(with_slipstream, speed={"compile": {"scope": "step", "cache": False}}),
}


def installed_contenders() -> dict[str, Callable[[Work], float]]:
    """Return the contenders whose packages are installed, and print which ones are skipped."""
    available = {}
    for name, (package, contender) in CONTENDERS.items():
        if find_spec(package) is None:
            print(f"skipping {name}: {package} is not installed (pip install -e '.[bench]')")
        else:
            available[name] = contender
    return available
