"""`leaves_of` returns the same leaves as torch, in the same order."""

from collections import OrderedDict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from slipstream.step.leaves import leaves_of

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
