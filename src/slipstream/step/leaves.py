"""Faster versions of `tree_leaves` and `tree_structure` of `torch.utils._pytree`, for batches.

Batches may also contain objects with tensors, such as OpenMMLab's data samples. The class of such an object must define
the method `_batch_fields`, which returns the values that belong to the batch as a dict. The order of the keys must be
the same for all objects with the same fields.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

__all__ = ["leaves_of", "structure_of"]

_FIELDS = "_batch_fields"


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested containers and of objects with `_batch_fields`, in order."""
    kind = type(tree)
    if kind is tuple or kind is list:
        children = tree
    elif kind is dict:
        children = tree.values()
    elif kind is Tensor:
        return [tree]
    elif hasattr(kind, _FIELDS):
        children = tree._batch_fields().values()
    else:
        return tree_leaves(tree)
    found: list[Any] = []
    for child in children:
        if type(child) is Tensor:
            found.append(child)
        else:
            found += leaves_of(child)
    return found


def structure_of(tree: Any) -> Any:
    """Return the structure of nested containers: their types, lengths, keys and fields, comparable with `==`."""
    kind = type(tree)
    if kind is Tensor:
        return None
    if kind is tuple or kind is list:
        return kind, [structure_of(child) for child in tree]
    if kind is dict:
        return list(tree), [structure_of(child) for child in tree.values()]
    if hasattr(kind, _FIELDS):
        return kind, structure_of(tree._batch_fields())
    return tree_structure(tree)
