"""Tests of `leaves_of` (compared with torch's `tree_leaves`), `flatten` and `clone_tensors`."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from slipstream.step.leaves import clone_tensors, flatten, leaves_of

Pair = namedtuple("Pair", "first second")
TENSOR = torch.zeros(2)
TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(TENSOR)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


@given(TREES)
def test_leaves_match_torch(tree):
    found, expected = leaves_of(tree), tree_leaves(tree)
    assert list(map(id, found)) == list(map(id, expected))


class Sample:
    def __init__(self, name, **fields):
        self.name, self.fields = name, fields

    def _batch_fields(self):
        return self.fields


def test_objects_with_fields_contribute_their_tensors_but_not_their_names():
    box, label = torch.zeros(4), torch.zeros(1)
    inner = Sample("boxes", box=box)
    batch = {
        "inputs": TENSOR,
        "samples": [Sample("a.png", boxes=inner, label=label), Sample("b.png", label=label)],
    }
    assert list(map(id, leaves_of(batch))) == list(map(id, [TENSOR, box, label, label]))
    other = {
        "inputs": TENSOR,
        "samples": [Sample("c.png", boxes=inner, label=box), Sample("d.png", label=box)],
    }
    assert flatten(batch)[1] == flatten(other)[1]
    swapped = {**batch, "samples": batch["samples"][::-1]}
    assert flatten(batch)[1] != flatten(swapped)[1]


class Item:
    def __init__(self, name, **fields):
        self.name = name
        vars(self).update(fields)

    def _batch_fields(self):
        return {key: value for key, value in vars(self).items() if key != "name"}


@dataclass(frozen=True)
class Scores:
    values: Any
    parent: Any = None


def test_copies_do_not_share_memory_with_the_outputs_of_a_graph():
    static = [torch.full((2,), float(i)) for i in range(5)]
    item = Item("a.png", scores=static[0], inner=Item("box", box=[static[1]]), count=3)
    scores = Scores({"x": static[2]}, item)
    item.scores_of = scores  # a cycle
    copied = clone_tensors({"loss": static[3], "items": (item, scores), "pair": Pair(static[4], "text")})
    for tensor in static:
        tensor.fill_(-1)
    # the objects are changed in place, because they can also belong to the inputs
    assert copied["items"] == (item, scores)
    assert (item.name, item.count, copied["pair"].second) == ("a.png", 3, "text")
    found = [item.scores, item.inner.box[0], scores.values["x"], copied["loss"], copied["pair"].first]
    assert [tensor.tolist() for tensor in found] == [[float(i)] * 2 for i in range(5)]
