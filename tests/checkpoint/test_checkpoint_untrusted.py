"""Test that hostile checkpoints cannot execute code, expand beyond their file size, or read or remove other files."""

import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from slipstream.checkpoint import load_checkpoint, read_meta, remove_checkpoint, verify_checkpoint
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


@pytest.fixture
def sharded(tmp_path, marker):
    """Save a sharded checkpoint with a hostile `.metadata`. Return a function that writes its index.

    The index states that the shard is in the given range of the file with the given name.
    """
    folder = tmp_path / "x.sharded"
    save({"w": torch.arange(4.0)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    name = next(path.name for path in folder.glob("*.distcp"))

    def write(file=name, start=0, length=None):
        length = (folder / name).stat().st_size if length is None else length
        parts = [([0], [4], file, start, length)]
        entry = {"path": ["state_dict", "w"], "dtype": torch.float32, "shape": [4], "parts": parts}
        content = {"checkpoint": {"state_dict": {"w": None}, "meta": {}}, "index": {"0/w": entry}}
        torch.save(content, folder / "plain.pth")
        return folder

    return write


def test_metadata_of_a_sharded_checkpoint_is_not_read(sharded, marker):
    folder = sharded()
    verify_checkpoint(folder)
    assert load_checkpoint(folder)["state_dict"]["w"].tolist() == [0, 1, 2, 3]
    assert not marker.exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "..", "", "a/b", "."])
def test_shards_outside_the_folder_are_not_read(sharded, name):
    folder = sharded(file=name)
    for read in (load_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            read(folder)


def test_a_shard_that_is_a_pickle_is_not_executed(sharded, marker):
    folder = sharded()
    shard = next(folder.glob("*.distcp"))
    torch.save(Evil(marker), shard)
    sharded(file=shard.name)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
    shard.write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(CheckpointError):
        load_checkpoint(sharded(file=shard.name))
    assert not marker.exists()


def test_compressed_entries_are_rejected_before_they_are_read(tmp_path):
    torch.save({"state_dict": {"w": torch.zeros(1000)}}, tmp_path / "x.pth")
    bomb = tmp_path / "bomb.pth"
    with zipfile.ZipFile(tmp_path / "x.pth") as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    assert torch.load(bomb, weights_only=True)["state_dict"]["w"].shape == (1000,)  # torch expands it
    with pytest.raises(
        CheckpointError, match=r"bomb\.pth was not loaded: its entry .*/data.pkl is compressed"
    ):
        load_checkpoint(bomb)


def test_entries_that_share_bytes_are_rejected(tmp_path):
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", bytes(5000))
        for number in range(10):
            copy = zipfile.ZipInfo(f"x/data/{number}")
            first = archive.infolist()[0]
            copy.header_offset, copy.CRC = first.header_offset, first.CRC
            copy.file_size = copy.compress_size = first.file_size
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
    with pytest.raises(CheckpointError, match=r"x\.pth is damaged: its entries are larger than the file"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["../victim.pth", "link/victim.pth", "a/../../victim.pth", "{victim}", ".", "..",
                                  "", "../victim.sharded", "link", "link/victim.sharded"])  # fmt: skip
def test_nothing_outside_the_folder_is_removed(tmp_path, name):
    work_dir, outside = tmp_path / "work", tmp_path / "outside"
    for folder in (work_dir, outside, outside / "victim.sharded", tmp_path / "victim.sharded"):
        folder.mkdir()
    victims = [tmp_path / "victim.pth", outside / "victim.pth", outside / "victim.sharded" / "x",
               tmp_path / "victim.sharded" / "x"]  # fmt: skip
    for path in victims:
        path.touch()
    (work_dir / "link").symlink_to(outside)
    remove_checkpoint(work_dir, name.format(victim=victims[0]))
    assert all(path.exists() for path in victims)
    assert work_dir.is_dir()


def test_links_to_checkpoints_are_removed_but_not_followed(tmp_path):
    target, work_dir = tmp_path / "big.sharded", tmp_path / "real"
    target.mkdir()
    work_dir.mkdir()
    (work_dir / "epoch_1.sharded").symlink_to(target)
    (tmp_path / "work").symlink_to(work_dir)  # the work_dir itself may be a link
    remove_checkpoint(tmp_path / "work", "epoch_1.sharded")
    assert target.is_dir()
    assert not Path(work_dir / "epoch_1.sharded").is_symlink()


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


def test_a_history_in_an_unknown_format_is_dropped(tmp_path, mmengine_history):
    history = mmengine_history()
    history._log_history = ["a"]
    write_mmengine(tmp_path / "epoch_1.pth", history)
    assert load_checkpoint(tmp_path / "epoch_1.pth")["message_hub"]["log_scalars"] == {}


@pytest.mark.parametrize("hub", [{"log_scalars": 5}, {"log_scalars": [1]}, {"runtime_info": None}])
def test_error_names_a_damaged_mmengine_message_hub(tmp_path, mmengine_history, hub):
    write_mmengine(tmp_path / "epoch_1.pth", mmengine_history(), message_hub=hub)
    with pytest.raises(CheckpointError, match=rf"epoch_1\.pth is damaged: message_hub\.{next(iter(hub))}"):
        load_checkpoint(tmp_path / "epoch_1.pth")
