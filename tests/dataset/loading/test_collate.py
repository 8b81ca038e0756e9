from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.dataset import default_collate, pseudo_collate
from slipstream.errors import DataError

Pair = namedtuple("Pair", "image label")


def test_dicts_are_collated_to_a_dict_of_lists_of_the_same_objects():
    samples = [{"inputs": torch.zeros(3, n, n), "meta": {"path": f"{n}.png"}} for n in (2, 5)]
    batch = pseudo_collate(samples)
    assert list(batch) == ["inputs", "meta"]
    assert all(ours is sample["inputs"] for ours, sample in zip(batch["inputs"], samples, strict=True))
    assert batch["meta"] == {"path": ["2.png", "5.png"]}


def test_tuples_and_lists_become_lists_of_columns():
    assert pseudo_collate([(1, "a"), (2, "b")]) == [[1, 2], ["a", "b"]]
    assert pseudo_collate([[1, 2.5], [3, 4.5]]) == [[1, 3], [2.5, 4.5]]


def test_named_tuples_keep_their_type():
    assert pseudo_collate([Pair(1, 2), Pair(3, 4)]) == Pair([1, 3], [2, 4])


def test_lists_of_different_lengths_raise_an_error():
    with pytest.raises(DataError, match=r"different lengths: \[2, 3\]"):
        pseudo_collate([(1, 2), (1, 2, 3)])


def test_pseudo_collate_supports_images_of_different_sizes():
    samples = [{"inputs": torch.zeros(3, n, n)} for n in range(1, 5)]
    batches = list(DataLoader(samples, batch_size=2, collate_fn=pseudo_collate))
    assert [[x.shape[-1] for x in batch["inputs"]] for batch in batches] == [[1, 2], [3, 4]]


def test_samples_of_different_sizes_are_reported_with_a_remedy():
    with pytest.raises(
        DataError, match=r"\[3, 4, 4\] at entry 0 .* resizes, crops or pads .* batch size of 1"
    ):
        default_collate([torch.zeros(3, 4, 4), torch.zeros(3, 4, 5)])
