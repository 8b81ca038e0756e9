from collections import namedtuple

import pytest
import torch

from slipstream.dist import cast_data_device, get_data_device
from slipstream.errors import DataError

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "left right")


def test_get_data_device_returns_the_common_device():
    assert get_data_device(torch.ones(1)) == CPU
    assert get_data_device({"a": [torch.ones(1), (torch.ones(2, device="cpu"),)]}) == CPU
    assert get_data_device([torch.ones(1, device="meta")]) == META


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.ones(1), torch.ones(1, device="meta")], r"devices are \['cpu', 'meta'\]"),
        ({}, r"devices are \[\]"),
        ([torch.ones(1), "x"], "not str"),
        (3, "not int"),
    ],
)
def test_get_data_device_raises_an_error_without_a_common_device(data, message):
    with pytest.raises(DataError, match=message):
        get_data_device(data)


def test_cast_data_device_keeps_the_structure():
    moved = cast_data_device({"a": [torch.ones(2)], "b": Pair(torch.ones(1), (torch.ones(3),))}, META)
    assert moved["a"][0].device == moved["b"].right[0].device == META
    assert isinstance(moved["b"], Pair)
    assert moved["b"].right[0].shape == (3,)


def test_cast_data_device_writes_into_out_and_returns_it():
    out = {"a": [torch.zeros(2)], "b": torch.zeros(1, dtype=torch.int64)}
    first = out["a"][0]
    assert cast_data_device({"b": torch.ones(1), "a": (torch.ones(2),)}, CPU, out) is out
    assert first.tolist() == [1, 1]
    assert out["b"].tolist() == [1]
