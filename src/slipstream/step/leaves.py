"""Faster versions of `tree_leaves` and `tree_structure` of `torch.utils._pytree`, for batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

__all__ = ["leaves_of", "structure_of"]


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested containers, in order."""
    kind = type(tree)
    if kind is tuple or kind is list:
        children = tree
    elif kind is dict:
        children = tree.values()
    else:
        return [tree] if kind is Tensor else tree_leaves(tree)
    found: list[Any] = []
    for child in children:
        if type(child) is Tensor:
            found.append(child)
        else:
            found += leaves_of(child)
    return found


def structure_of(tree: Any) -> Any:
    """Return the structure of nested containers: their types, lengths and keys, comparable with `==`."""
    kind = type(tree)
    if kind is Tensor:
        return None
    if kind is tuple or kind is list:
        return kind, [structure_of(child) for child in tree]
    if kind is dict:
        return list(tree), [structure_of(child) for child in tree.values()]
    return tree_structure(tree)
