"""Datasets and collate functions have MMEngine's semantics."""

import json
import pickle
from collections import namedtuple
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mmengine.dataset import (
    BaseDataset,
    ClassBalancedDataset,
    Compose,
    ConcatDataset,
    RepeatDataset,
    default_collate,
    force_full_init,
    pseudo_collate,
)
from mmengine.structures import BaseDataElement

from slipstream.errors import DataError

Pair = namedtuple("Pair", "a b")


class Numbers(BaseDataset):
    METAINFO: ClassVar[dict[str, Any]] = {"classes": ("a", "b")}

    def load_data_list(self):
        return [{"value": i} for i in range(6)]

    def filter_data(self):
        return [info for info in self.data_list if info["value"] != 1]


def values(dataset):
    return [dataset[i]["value"] for i in range(len(dataset))]


@pytest.mark.parametrize("serialize", [True, False])
def test_samples_are_filtered_numbered_and_copied(serialize):
    dataset = Numbers(serialize_data=serialize)
    assert values(dataset) == [0, 2, 3, 4, 5]
    info = dataset.get_data_info(-1)
    assert info == {"value": 5, "sample_idx": 4}
    info["value"] = 99
    assert dataset.get_data_info(4)["value"] == 5


@pytest.mark.parametrize("serialize", [True, False])
@pytest.mark.parametrize(
    ("indices", "expected"), [(2, [0, 2]), (-2, [4, 5]), ([3, 0, 3], [4, 0, 4]), ([-1], [5]), (0, [])]
)
def test_subsets_contain_the_selected_samples(serialize, indices, expected):
    dataset = Numbers(serialize_data=serialize)
    assert values(dataset.get_subset(indices)) == expected
    assert len(dataset) == 5
    dataset.get_subset_(indices)
    assert values(dataset) == expected


def test_a_lazy_dataset_loads_on_first_use():
    dataset = Numbers(lazy_init=True)
    assert dataset.data_list == []
    assert len(dataset) == 5
    with pytest.raises(AttributeError, match="full_init"):
        force_full_init(lambda obj: None)(3)


def test_annotation_files_and_metainfo_are_read(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    content = {"metainfo": {"classes": ["x"], "task": "t"}, "data_list": [{"img_path": "1.png", "label": 0}]}
    (tmp_path / "ann.json").write_text(json.dumps(content))
    dataset = BaseDataset(
        "ann.json",
        metainfo={"classes": str(tmp_path / "classes.txt"), "note": "text"},
        data_root=str(tmp_path),
        data_prefix={"img_path": "images"},
    )
    assert dataset.metainfo == {"classes": ["cat", "dog"], "note": "text", "task": "t"}
    assert dataset[0] == {"img_path": f"{tmp_path}/images/1.png", "label": 0, "sample_idx": 0}
    (tmp_path / "ann.json").write_text("[]")
    with pytest.raises(DataError, match="'metainfo' and 'data_list'"):
        BaseDataset("ann.json", data_root=str(tmp_path))


def test_a_different_sample_replaces_one_without_data():
    np.random.seed(0)
    odd = [lambda info: info if info["value"] % 2 else None]
    assert Numbers(pipeline=odd)[0]["value"] in (3, 5)
    with pytest.raises(DataError, match="sample 0"):
        Numbers(pipeline=odd, test_mode=True)[0]
    with pytest.raises(DataError, match="returned None 4 times"):
        Numbers(pipeline=[lambda info: None], max_refetch=3)[0]


def test_a_pipeline_ends_at_the_first_none():
    calls = []
    assert Compose([lambda x: None, calls.append])(1) is None
    assert calls == []
    assert Compose(None)(4) == 4
    with pytest.raises(TypeError, match="callable or a dict"):
        Compose([3])


class Classes(Numbers):
    def get_cat_ids(self, idx):
        return [0 if idx == 2 else 1]


def test_wrappers_return_the_annotations_of_the_samples():
    first, second = (Classes(pipeline=[], indices=count, lazy_init=True) for count in (3, 4))
    both = ConcatDataset([first, second])
    both.full_init()
    assert [both.get_data_info(i)["value"] for i in (0, 2, 3, 6, -1)] == [0, 3, 0, 4, 4]
    assert [both[i]["value"] for i in (-1, -7)] == [4, 0]
    with pytest.raises(IndexError):
        both[-8]
    repeated = RepeatDataset(first, 2)
    assert [repeated.get_data_info(i)["value"] for i in range(6)] == [0, 2, 3] * 2
    balanced = ClassBalancedDataset(first, 1.0)
    assert [balanced.get_data_info(i) for i in range(len(balanced))] == [
        balanced[i] for i in range(len(balanced))
    ]


def test_datasets_can_be_sent_to_workers():
    assert values(pickle.loads(pickle.dumps(Numbers()))) == [0, 2, 3, 4, 5]


def test_pseudo_collate_returns_lists_of_unchanged_values():
    element = BaseDataElement(a=1)
    batch = pseudo_collate(
        [
            {"x": torch.zeros(2), "s": element, "p": Pair(1, "u")},
            {"x": torch.ones(3), "s": element, "p": Pair(2, "v")},
        ]
    )
    assert [len(x) for x in batch["x"]] == [2, 3]
    assert batch["s"] == [element, element]
    assert [list(part) for part in batch["p"]] == [[1, 2], ["u", "v"]]
    assert isinstance(batch["p"], Pair)
    with pytest.raises(DataError, match=r"lengths: \[1, 2\]"):
        pseudo_collate([[1], [1, 2]])


def test_default_collate_stacks_tensors_but_not_elements():
    element = BaseDataElement(a=1)
    batch = default_collate([(torch.zeros(2), element, 1.5), (torch.ones(2), element, 2.5)])
    assert batch[0].tolist() == [[0, 0], [1, 1]]
    assert list(batch[1]) == [element, element]
    assert batch[2].tolist() == [1.5, 2.5]
