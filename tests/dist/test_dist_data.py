from collections import namedtuple

import pytest
import torch

from slipstream.dist import cast_data_device, get_data_device
from slipstream.errors import DataError

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "left right")


def test_the_device_of_nested_tensors_is_the_one_they_share():
    assert get_data_device(torch.ones(1)) == CPU
    assert get_data_device({"a": [torch.ones(1), (torch.ones(2, device="cpu"),)]}) == CPU
    assert get_data_device([torch.ones(1, device="meta")]) == META


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([torch.ones(1), torch.ones(1, device="meta")], "on: cpu, meta"),
        ({}, "on: none"),
        ([torch.ones(1), "x"], "not str"),
        (3, "not int"),
    ],
)
def test_data_without_one_device_is_an_error(data, says):
    with pytest.raises(DataError, match=says):
        get_data_device(data)


def test_tensors_are_moved_inside_the_same_structure():
    moved = cast_data_device({"a": [torch.ones(2)], "b": Pair(torch.ones(1), (torch.ones(3),))}, META)
    assert moved["a"][0].device == moved["b"].right[0].device == META
    assert isinstance(moved["b"], Pair)
    assert moved["b"].right[0].shape == (3,)


def test_tensors_are_written_into_out_which_is_returned():
    out = {"a": [torch.zeros(2)], "b": torch.zeros(1, dtype=torch.int64)}
    first = out["a"][0]
    assert cast_data_device({"b": torch.ones(1), "a": (torch.ones(2),)}, CPU, out) is out
    assert first.tolist() == [1, 1]
    assert out["b"].tolist() == [1]


@pytest.mark.parametrize("out", [{}, {"b": torch.ones(1)}, [torch.ones(1)], {"a": 1}, {"a": [torch.ones(1)]}])
def test_another_structure_of_out_is_an_error(out):
    with pytest.raises(DataError, match="`out` should have"):
        cast_data_device({"a": torch.ones(1)}, CPU, out)


def test_what_is_no_tensor_cannot_be_moved():
    with pytest.raises(DataError, match="not str"):
        cast_data_device(["x"], CPU)
