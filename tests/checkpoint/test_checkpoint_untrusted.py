"""Test that hostile checkpoints cannot execute code, expand beyond their file size, or read or remove other files."""

import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from slipstream.checkpoint import load_checkpoint, read_meta, verify_checkpoint
from slipstream.errors import CheckpointError


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "was_here"


def pickles(tmp_path, marker):
    """Yield files that create `marker` when they are unpickled."""
    evil = Evil(marker)
    contents = [
        evil,
        {"state_dict": {"w": torch.ones(2)}, "meta": {"a": [{"b": (evil,)}]}},
        {"state_dict": {"w": torch.ones(2), evil: 1}},
        {"message_hub": {"runtime_info": {"x": evil}}},
    ]
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / f"zip{number}.pth")
        torch.save(content, tmp_path / f"old{number}.pth", _use_new_zipfile_serialization=False)
        yield from (tmp_path / f"zip{number}.pth", tmp_path / f"old{number}.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps({"meta": evil}))
    yield tmp_path / "plain.pth"
    with zipfile.ZipFile(
        tmp_path / "nested.pth", "w"
    ) as archive:  # a pickle under every name that torch reads
        for name in ("data.pkl", "constants.pkl", ".data/serialization_id", "version", "byteorder", "code/x.py",
                     "../../data.pkl", "/data.pkl", ".metadata", "data/0"):  # fmt: skip
            archive.writestr(f"archive/{name}", pickle.dumps(evil))
    yield tmp_path / "nested.pth"


def test_pickles_are_not_executed(tmp_path, marker):
    files = list(pickles(tmp_path, marker))
    for path in files:
        for read in (load_checkpoint, read_meta):
            with pytest.raises(CheckpointError, match=path.name):
                read(path)
        assert not marker.exists(), path
    os.system(f"touch {marker}")  # the command in the pickles works
    assert marker.exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "..", "", "a/b", "."])
def test_shards_outside_the_folder_are_not_read(tmp_path, name):
    folder = tmp_path / "x.sharded"
    folder.mkdir()
    entry = {"path": ["w"], "dtype": torch.float32, "shape": [4], "parts": [([0], [4], name)]}
    torch.save({"checkpoint": {"w": None}, "index": {"0/w": entry}}, folder / "plain.pth")
    for read in (load_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            read(folder)


class Method:
    """A value that is pickled like a method of MMEngine's HistoryBuffer, through a call to `getattr`."""

    def __reduce__(self):
        return getattr, (sys.modules["mmengine.logging.history_buffer"].HistoryBuffer, "mean")


@pytest.fixture
def mmengine_history(monkeypatch):
    """Return a class with the import path of MMEngine's HistoryBuffer."""
    module = types.ModuleType("mmengine.logging.history_buffer")
    for name in ("mmengine", "mmengine.logging"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class HistoryBuffer:
        pass

    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = module.__name__, "HistoryBuffer"
    module.HistoryBuffer = HistoryBuffer
    return HistoryBuffer


def write_mmengine(path, history, **entries):
    meta = {"epoch": 1, "iter": 2, "seed": 3, "mmengine_version": "0.10.7"}
    hub = {"log_scalars": {"train/loss": history}, "runtime_info": {"iter": 1, "score": np.float64(0.5)}}
    torch.save({"meta": meta, "state_dict": {"w": torch.ones(2)}, "message_hub": hub, **entries}, path)


def test_an_mmengine_checkpoint_is_read(tmp_path, mmengine_history):
    history = mmengine_history()
    vars(history).update(_log_history=np.array([2.0, 1.0]), _count_history=np.array([1, 4]), max_length=9)
    history.statistics_methods = {"mean": Method()}
    write_mmengine(tmp_path / "epoch_1.pth", history)
    checkpoint = load_checkpoint(tmp_path / "epoch_1.pth")
    assert checkpoint["message_hub"] == {
        "log_scalars": {
            "train/loss": {"log_history": [2.0, 1.0], "count_history": [1, 4], "max_length": 10_000}
        },
        "runtime_info": {"iter": 1, "score": 0.5},
    }
    assert checkpoint["state_dict"]["w"].tolist() == [1, 1]


class ReadsAttribute:
    """An object whose pickle calls `getattr(OrderedDict, "fromkeys")`."""

    def __reduce__(self):
        return getattr, (OrderedDict, "fromkeys")


def test_an_mmengine_checkpoint_cannot_read_attributes_of_other_classes(tmp_path, mmengine_history):
    write_mmengine(tmp_path / "epoch_1.pth", mmengine_history(), extra=ReadsAttribute())
    with pytest.raises(CheckpointError, match=r"an object's 'fromkeys' attribute, which could execute code"):
        load_checkpoint(tmp_path / "epoch_1.pth")
