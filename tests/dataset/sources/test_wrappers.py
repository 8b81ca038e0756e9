from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import Dataset

from slipstream.dataset import ClassBalancedDataset, ConcatDataset, RepeatDataset, SampleIndex
from slipstream.registry import DATASETS


class Labels(Dataset):
    """A dataset whose samples are (label, index, seed, epoch)."""

    def __init__(self, labels, classes=("a", "b"), **metainfo):
        self.labels = [label if isinstance(label, tuple) else (label,) for label in labels]
        self.metainfo = {
            "classes": classes,
            "palette": [[0, 0, 0], [1, 1, 1]],
            "ignore_index": None,
            **metainfo,
        }

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return (*self.labels[index], int(index), getattr(index, "seed", 0), getattr(index, "epoch", 0))

    def get_cat_ids(self, index):
        return list(self.labels[index])


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    DATASETS.get("ConcatDataset")
    monkeypatch.setitem(DATASETS.module_dict, "Labels", Labels)


def test_concat_keeps_order_seed_and_epoch():
    joined = ConcatDataset([Labels("ab"), Labels("c"), Labels("def")])
    assert isinstance(joined, TorchConcatDataset)
    samples = [joined[SampleIndex(i, 7, 3)] for i in range(len(joined))]
    expected = [("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 1), ("f", 2)]
    assert samples == [(label, i, 7, 3) for label, i in expected]
    assert [joined.get_cat_ids(i) for i in range(6)] == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]


def test_concat_and_repeat_are_built_from_configs():
    cfg = {"type": "Labels", "labels": [0, 1]}
    nested = {
        "type": "ConcatDataset",
        "datasets": [cfg, {"type": "RepeatDataset", "dataset": cfg, "times": 3}],
    }
    assert len(DATASETS.build(nested)) == 8


def test_concat_compares_lists_and_tuples_and_skips_ignored_keys():
    ConcatDataset([Labels([0]), Labels([0], classes=["a", "b"], palette=np.array([[0, 0, 0], [1, 1, 1]]))])
    assert ConcatDataset([Labels([0], year=1), Labels([0], year=2)], ignore_keys="year").metainfo["year"] == 1
    ConcatDataset([Labels([0], year=1), Labels([0], classes=("x",))], ignore_keys=["year", "classes"])


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_each_repeat_has_a_unique_epoch(length, times, epochs):
    dataset = RepeatDataset(Labels(range(length)), times)
    seen = [dataset[SampleIndex(i, 5, e)] for e in range(epochs) for i in range(len(dataset))]
    assert len(dataset) == length * times
    assert [s[0] for s in seen] == list(range(length)) * times * epochs
    assert len(set(seen)) == len(seen)
    assert {s[3] for s in seen} == set(range(times * epochs))


def test_samples_of_rare_classes_are_repeated():
    # b is in 1 of 8 samples: ceil(sqrt(0.5 / 0.125)) = 2 copies. c is also in 1 of 8, and a is in 7 of 8.
    dataset = ClassBalancedDataset(Labels([*"aaaaaa", "b", ("a", "c")]), 0.5)
    assert dataset.repeat_indices == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7]
    assert [s[0] for s in dataset] == [*"aaaaaa", *"bb", *"aa"]
    assert dataset.get_cat_ids(9) == ["a", "c"]


@given(
    st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=12), st.floats(0.01, 1.0, allow_subnormal=False)
)
def test_repeat_counts_follow_the_formula(labels, threshold):
    dataset = ClassBalancedDataset(Labels([tuple(ids) for ids in labels]), threshold)
    for i, ids in enumerate(labels):
        factors = [math.sqrt(threshold / (sum(c in other for other in labels) / len(labels))) for c in ids]
        assert dataset.repeat_indices.count(i) == math.ceil(max([1.0, *factors]))


def test_wrappers_can_be_nested():
    rare = ClassBalancedDataset(ConcatDataset([Labels("aaaa"), RepeatDataset(Labels("b"), 1)]), 1.0)
    seen = [RepeatDataset(rare, 2)[SampleIndex(i, 1, 4)] for i in range(2 * len(rare))]
    assert len(set(seen)) == len(seen)
    assert {s[2] for s in seen} == {1}
