"""Suggestions for unknown network names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from slipstream.errors import MissingPackageError
from slipstream.zoo.timm_networks import PREFIX, import_timm

__all__ = ["TIMM_REMEDY", "network_hint"]

TIMM_REMEDY = f"other classification networks come from timm, under the name {PREFIX}NAME"

_MIN_SIMILARITY = 0.8
"""Minimum similarity of a suggestion. With a lower value, a segmentation network would be suggested for vit_base."""
_TIMM_NAMES = {
    "mobilenetv2": "mobilenetv2_100",
    "mobilenetv3large": "mobilenetv3_large_100",
    "mobilenetv3small": "mobilenetv3_small_100",
    "regnety200": "regnety_002",
    "regnety400": "regnety_004",
    "regnety600": "regnety_006",
    "regnety800": "regnety_008",
    "vitbase": "vit_base_patch16_224",
    "vithuge": "vit_huge_patch14_224",
    "vitlarge": "vit_large_patch16_224",
}
"""Maps SuperGradients' names without underscores to timm's names, where the two differ."""


def network_hint(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest network, or an empty string if there is none.

    The candidates are, in this order: the network in timm with the same name, a name in `known` that is similar to
    `name` or starts with it, and a network in timm that SuperGradients calls `name` or whose name starts with `name`.
    The networks in timm are candidates only if timm is installed. Underscores and case are ignored.
    """
    by_plain = {_plain(other): other for other in known}
    close = get_close_matches(_plain(name), by_plain, n=1, cutoff=_MIN_SIMILARITY)
    from_timm = _timm_name(name)
    if from_timm is not None and _plain(from_timm) == _plain(name):
        found: str | None = f"{PREFIX}{from_timm}"
    elif close:
        found = by_plain[close[0]]
    else:
        found = _completed(name, by_plain.values()) or (from_timm and f"{PREFIX}{from_timm}")
    return f"; did you mean '{found}'?" if found else ""


def _timm_name(name: str) -> str | None:
    """Return timm's name for the network `name`, or None if timm has no such network or cannot be imported.

    The result is the name in `_TIMM_NAMES`, or else the shortest of timm's names that start with `name`.
    """
    try:
        known = import_timm().list_models()
    except MissingPackageError:
        return None
    renamed = _TIMM_NAMES.get(_plain(name))
    return renamed if renamed in known else _completed(name, known)


def _completed(name: str, known: Iterable[str]) -> str | None:
    """Return the shortest name in `known` that starts with `name`; None if no name does, or if `name` is empty."""
    start = _plain(name)
    if not start:
        return None
    return min((other for other in known if _plain(other).startswith(start)), key=len, default=None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
