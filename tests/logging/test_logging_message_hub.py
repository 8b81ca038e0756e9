import io
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import DataError
from slipstream.logging import MessageHub


@pytest.mark.parametrize(
    "value",
    [2.5, np.float32(2.5), np.array([2.5]), torch.tensor(2.5), torch.tensor([[2.5]], dtype=torch.bfloat16)],
)
def test_scalar_becomes_a_plain_float(value):
    hub = MessageHub("a")
    hub.update_scalar("train/loss", value)
    current = hub.get_scalar("train/loss").current()
    assert type(current) is float
    assert current == 2.5


@pytest.mark.parametrize("value", [torch.ones(2), np.ones((1, 3)), "1.0", None, [1.0]])
def test_invalid_scalar_error_names_the_key(value):
    hub = MessageHub("a")
    with pytest.raises(DataError, match="'train/loss' must be a single number"):
        hub.update_scalar("train/loss", value)
    assert not hub.log_scalars


def test_update_scalars_accepts_counts():
    hub = MessageHub("a")
    hub.update_scalars({"x": 1.0, "y": {"value": 1.0, "count": 3}})
    hub.update_scalars({"y": {"value": 5.0}})
    assert hub.get_scalar("y").mean() == 2.0
    with pytest.raises(DataError, match="scalar 'z' must have a 'value' key"):
        hub.update_scalars({"z": {"count": 1}})


def saved_and_loaded(hub, **options):
    """Save the state of `hub` to a file, and return a new hub that has loaded the file."""
    file = io.BytesIO()
    torch.save(hub.state_dict(**options), file)
    file.seek(0)
    loaded = MessageHub("b")
    loaded.update_info("mine", 1)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    return loaded


def test_state_contains_only_resumed_values():
    hub = MessageHub("a")
    hub.update_scalar("train/loss", 0.5, count=4)
    hub.update_scalar("train/time", 0.1, resumed=False)
    hub.update_info_dict({"iter": 7, "nested": {"a": [1, (None, "x")]}})
    hub.update_info("eta", 3.0, resumed=False)
    loaded = saved_and_loaded(hub)
    assert dict(loaded.runtime_info) == {"mine": 1, "iter": 7, "nested": {"a": [1, (None, "x")]}}
    assert set(loaded.log_scalars) == {"train/loss"}
    assert [part.tolist() for part in loaded.get_scalar("train/loss").data] == [[0.5], [4]]
    assert loaded.state_dict()["log_scalars"] == hub.state_dict()["log_scalars"]


def test_state_contains_infos_as_tensors_and_built_in_values():
    hub = MessageHub("a")
    values = {
        "number": (np.float32(2), 2.0),
        "nested": (
            {"steps": 5, "best": np.float64(0.5), "list": [np.int64(1)]},
            {"steps": 5, "best": 0.5, "list": [1]},
        ),
        "set": ({1}, [1]),
        "bytes": (b"x", b"x"),
        "complex": (1j, 1j),
        "path": (Path("/x"), "/x"),
        "ordered": (OrderedDict(a=1), {"a": 1}),
        "counter": (Counter(a=1), {"a": 1}),
    }
    hub.update_info_dict({key: value for key, (value, _) in values.items()})
    hub.update_info_dict({"tensor": torch.ones(2), "array": [np.ones(2)]})
    loaded = saved_and_loaded(hub)
    assert torch.equal(loaded.get_info("tensor"), torch.ones(2))
    assert torch.equal(loaded.get_info("array")[0], torch.ones(2, dtype=torch.float64))
    for key, (_, expected) in values.items():
        assert loaded.get_info(key) == expected, key
        assert type(loaded.get_info(key)) is type(expected), key


def test_hubs_are_independent_and_current_is_per_context():
    first, second = MessageHub("a"), MessageHub("a")
    first.update_scalar("x", 1.0)
    assert not second.log_scalars
    with first.as_current(), ThreadPoolExecutor(1) as pool:
        assert MessageHub.get_current_instance() is first
        with second.as_current():
            assert MessageHub.get_current_instance() is second
        assert pool.submit(MessageHub.get_current_instance).result() is not first
    assert MessageHub.get_current_instance().get_info("anything") is None
