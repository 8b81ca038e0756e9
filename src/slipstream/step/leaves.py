"""Return the leaves and the structure of batches, faster than `torch.utils._pytree`, and clone nested tensors.

Batches may also contain objects with tensors, such as OpenMMLab's data samples. Their class must define a
`_batch_fields` method, which returns a dict of the values that belong to the batch. The order of the keys must be
the same for all objects with the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

__all__ = ["clone_tensors", "leaves_of", "structure_of"]

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
    leaves: list[Any] = []
    for child in children:
        if type(child) is Tensor:
            leaves.append(child)
        else:
            leaves += leaves_of(child)
    return leaves


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


def clone_tensors(tree: Any) -> Any:
    """Return a copy of nested containers in which each tensor is cloned.

    Objects with `_batch_fields` and dataclasses are not copied, because other code may hold references to them. Their
    tensors are replaced in place.
    """

    changed: set[int] = set()

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        if id(leaf) in changed:
            return leaf
        changed.add(id(leaf))
        for name, value in _attributes(leaf).items():
            object.__setattr__(leaf, name, tree_map(clone, value))  # also works for frozen dataclasses
        return leaf

    return tree_map(clone, tree)


def _attributes(leaf: Any) -> Mapping[str, Any]:
    if hasattr(type(leaf), _FIELDS):
        found: Mapping[str, Any] = leaf._batch_fields()
        return found
    return vars(leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else {}
