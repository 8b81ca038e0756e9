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

__all__ = ["clone_tensors", "flatten", "leaves_of"]

_FIELDS = "_batch_fields"


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers and of objects with `_batch_fields`, in order, and their structure.

    The structure consists of types, lengths, keys and fields, and is comparable with `==`.
    """
    kind = type(tree)
    children: Any
    names: Any
    if kind is tuple or kind is list:
        children, names = tree, kind
    elif kind is dict:
        children, names = tree.values(), list(tree)
    elif kind is Tensor:
        return [tree], None
    elif hasattr(kind, _FIELDS):
        fields = tree._batch_fields()
        children, names = fields.values(), (kind, list(fields))
    else:
        return tree_leaves(tree), tree_structure(tree)
    leaves: list[Any] = []
    structures: list[Any] = []
    for child in children:
        if type(child) is Tensor:
            leaves.append(child)
            structures.append(None)
        else:
            own, structure = flatten(child)
            leaves += own
            structures.append(structure)
    return leaves, (names, structures)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested containers and of objects with `_batch_fields`, in order."""
    return flatten(tree)[0]


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
