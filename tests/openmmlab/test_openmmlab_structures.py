"""Data elements have MMEngine's semantics. The expected values are written by hand."""

import numpy as np
import pytest
import torch

from slipstream.openmmlab.mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData


class Sample(BaseDataElement):
    @property
    def boxes(self):
        return self._boxes

    @boxes.setter
    def boxes(self, value):
        self.set_field(value, "_boxes", dtype=torch.Tensor)

    @boxes.deleter
    def boxes(self):
        del self._boxes


def test_a_name_cannot_be_both_data_and_metainfo():
    element = BaseDataElement(metainfo={"size": (4, 5)}, label=torch.tensor(1))
    assert element.metainfo_keys() == ["size"]
    assert element.keys() == ["label"]
    assert element.all_keys() == ["size", "label"]
    with pytest.raises(AttributeError, match="'size' cannot be set as data"):
        element.size = 1
    with pytest.raises(AttributeError, match="'label' cannot be set as metainfo"):
        element.set_metainfo({"label": 1})
    with pytest.raises(AttributeError, match="private"):
        element._data_fields = set()


def test_metainfo_is_copied_and_data_is_shared():
    shape, data = [4, 5], torch.zeros(2)
    element = BaseDataElement(metainfo={"shape": shape}, data=data)
    shape.append(6)
    clone = element.clone()
    assert element.shape == [4, 5]
    assert clone.data is data
    assert clone.shape is not element.shape


def test_new_replaces_only_the_given_group():
    element = BaseDataElement(metainfo={"id": 1}, a=1, b=2)
    assert element.new(a=5).to_dict() == {"id": 1, "a": 5}
    assert element.new(metainfo={"id": 2}).to_dict() == {"id": 2, "a": 1, "b": 2}


def test_fields_can_be_deleted_or_popped():
    element = BaseDataElement(metainfo={"id": 1}, a=1)
    del element.a
    assert "a" not in element
    assert element.pop("id") == 1
    assert element.pop("id", 7) == 7
    with pytest.raises(KeyError, match="id"):
        element.pop("id")


def test_update_replaces_fields_and_get_has_a_default():
    element = BaseDataElement(metainfo={"id": 1}, a=1)
    element.update(BaseDataElement(metainfo={"id": 2}, b=3))
    assert element.to_dict() == {"id": 2, "a": 1, "b": 3}
    assert element.get("c", 9) == 9


def test_a_property_is_a_field_and_hides_the_attribute_behind_it():
    sample = Sample(boxes=torch.ones(1, 4))
    assert sample.keys() == ["boxes"]  # `_boxes` is hidden
    assert "boxes" in sample
    with pytest.raises(AssertionError, match="must be of type"):
        sample.boxes = [1, 2]
    del sample.boxes
    assert sample.keys() == []


def test_conversions_apply_to_nested_elements():
    element = BaseDataElement(
        a=torch.ones(2, requires_grad=True), inner=InstanceData(b=torch.zeros(1)), text="x"
    )
    assert not element.detach().a.requires_grad
    arrays = element.numpy()
    assert isinstance(arrays.a, np.ndarray)
    assert isinstance(arrays.inner.b, np.ndarray)
    assert arrays.text == "x"
    assert isinstance(arrays.to_tensor().inner.b, torch.Tensor)
    assert element.to(torch.float64).inner.b.dtype == torch.float64
    assert element.to_dict()["inner"] == {"b": torch.zeros(1)}


def test_instances_must_have_equal_lengths():
    instances = InstanceData(labels=torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError, match="has length 2, but"):
        instances.scores = torch.zeros(2)
    with pytest.raises(AssertionError, match="must have a length"):
        InstanceData(labels=3)
    assert len(InstanceData()) == 0


def test_an_index_selects_instances_in_all_fields():
    instances = InstanceData(
        metainfo={"id": 1},
        boxes=torch.arange(12).view(3, 4),
        names=["a", "b", "c"],
        scores=np.arange(3.0),
        text="xyz",
    )
    mask = instances[torch.tensor([True, False, True])]
    assert mask.boxes.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert mask.names == ["a", "c"]
    assert mask.scores.tolist() == [0.0, 2.0]
    assert mask.text == "xz"
    assert mask.id == 1
    assert instances[[2, 0]].names == ["c", "a"]
    assert instances[np.array([1], dtype=np.int32)].names == ["b"]
    assert instances[-1].boxes.tolist() == [[8, 9, 10, 11]]
    assert instances[1:].names == ["b", "c"]
    assert instances["names"] == ["a", "b", "c"]
    empty = instances[torch.zeros(3, dtype=torch.bool)]
    assert (len(empty), empty.names, empty.boxes.shape) == (0, [], (0, 4))
    with pytest.raises(IndexError, match="3 is out of range"):
        instances[3]
    with pytest.raises(AssertionError, match="mask has length 2"):
        instances[torch.tensor([True, False])]


def test_instances_with_the_same_fields_are_concatenated():
    first = InstanceData(metainfo={"id": 1}, boxes=torch.zeros(1, 4), names=["a"])
    second = InstanceData(metainfo={"id": 2}, boxes=torch.ones(2, 4), names=["b", "c"])
    both = InstanceData.cat([first, second])
    assert both.boxes[:, 0].tolist() == [0, 1, 1]
    assert both.names == ["a", "b", "c"]
    assert (both.id, first.names) == (1, ["a"])
    assert InstanceData.cat([first]) is first
    with pytest.raises(AssertionError, match="must have the same fields"):
        InstanceData.cat([first, InstanceData(boxes=torch.zeros(1, 4))])


def test_pixel_data_is_cropped():
    maps = PixelData(metainfo={"id": 1}, label=torch.arange(12).view(1, 3, 4))
    assert maps.shape == (3, 4)
    assert maps[1:, :2].label.tolist() == [[[4, 5], [8, 9]]]
    assert maps[0, 3].label.tolist() == [[[3]]]
    with pytest.warns(UserWarning, match="is stored with shape"):
        maps.other = torch.zeros(3, 4)
    assert maps.other.shape == (1, 3, 4)
    with pytest.raises(AssertionError, match="but the PixelData has size"):
        maps.wrong = torch.zeros(1, 2, 2)
    with pytest.raises(TypeError, match="two ints or slices"):
        maps[0]


def test_labels_are_converted_to_one_hot_vectors_and_back():
    onehot = LabelData.label_to_onehot(torch.tensor([2, 0]), 4)
    assert onehot.tolist() == [1, 0, 1, 0]
    assert LabelData.onehot_to_label(onehot).tolist() == [0, 2]
    with pytest.raises(ValueError, match="one-hot"):
        LabelData.onehot_to_label(torch.tensor([2, 0]))


def test_repr_contains_metainfo_and_data():
    text = repr(BaseDataElement(metainfo={"id": 1}, inner=InstanceData(a=[1])))
    assert text.startswith("<BaseDataElement(\n\n    META INFORMATION\n    id: 1")
    assert "DATA FIELDS\n    inner: <InstanceData(" in text
