import enum
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.checkpoint import (
    find_latest_checkpoint,
    load_checkpoint,
    mark_last_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from slipstream.errors import CheckpointError


class Level(enum.IntEnum):
    HIGH = 3


class Color(str, enum.Enum):  # noqa: UP042  (older code uses such classes, and their str() differs)
    RED = "red"


def refuse(message):
    raise AssertionError(message)


def round_trip(value, tmp_path):
    save_checkpoint({"value": value}, tmp_path / "a.pth", refuse)
    return load_checkpoint(tmp_path / "a.pth")["value"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.float64(1.5), 1.5),  # a subclass of float
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),  # a subclass of str
        (np.complex128(1 + 2j), 1 + 2j),
        (Level.HIGH, 3),
        (Color.RED, "red"),
        (True, True),
        (None, None),
        (b"\x00\xff", b"\x00\xff"),
        (2**80, 2**80),
        (float("inf"), float("inf")),
        (Path("a/b"), "a/b"),
        ({np.int64(2): np.float64(3), Level.HIGH: 1}, {2: 3.0, 3: 1}),
        (OrderedDict(a=[np.float64(1), (2,)]), {"a": [1.0, (2,)]}),
        (namedtuple("Pair", "a b")(1, np.int32(2)), (1, 2)),
        (torch.Size([2, 3]), (2, 3)),
        ({3}, [3]),
        (torch.device("cpu"), torch.device("cpu")),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_plain_python_and_numpy_values_round_trip(tmp_path, value, wanted):
    got = round_trip(value, tmp_path)
    assert got == wanted
    assert type(got) is type(wanted)
    if isinstance(got, dict):
        assert [type(key) for key in got] == [type(key) for key in wanted]


@pytest.mark.parametrize("crash", [OSError("No space left on device"), KeyboardInterrupt()])
def test_crash_while_writing_keeps_only_the_old_file(tmp_path, monkeypatch, crash):
    path = tmp_path / "a.pth"
    save_checkpoint({"epoch": 1}, path, refuse)

    def half(content, target):
        Path(target).write_bytes(b"PK half a file")
        raise crash

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(type(crash)):
        save_checkpoint({"epoch": 2}, path, refuse)
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"epochs: 30\n", b"just a text"])
def test_file_not_written_by_torch_is_rejected(tmp_path, content):
    path = tmp_path / "notes.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"notes\.pth is not a checkpoint"):
        load_checkpoint(path)


def test_missing_file_error_suggests_the_closest_name(tmp_path):
    save_checkpoint({}, tmp_path / "epoch_10.pth", refuse)
    with pytest.raises(CheckpointError, match=r"epoch_1\.pth does not exist; did you mean 'epoch_10\.pth'\?"):
        load_checkpoint(tmp_path / "epoch_1.pth")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere" / "a.pth")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path)


def test_latest_checkpoint_is_found_after_its_folder_was_moved(tmp_path):
    folder = tmp_path / "run"
    assert find_latest_checkpoint(folder) is None
    save_checkpoint({}, folder / "epoch_1.pth", refuse)
    mark_last_checkpoint(folder, folder / "epoch_1.pth")
    assert find_latest_checkpoint(folder) == folder / "epoch_1.pth"
    moved = folder.rename(tmp_path / "moved")
    assert find_latest_checkpoint(moved) == moved / "epoch_1.pth"
    (moved / "epoch_1.pth").unlink()
    with pytest.raises(
        CheckpointError, match=r"last_checkpoint refers to .*epoch_1\.pth, which does not exist"
    ):
        find_latest_checkpoint(moved)


def test_remove_checkpoint_removes_files_and_sharded_folders(tmp_path):
    (tmp_path / "a.sharded").mkdir()
    for name in ("a.pth", "a.sharded/plain.pth"):
        (tmp_path / name).touch()
    for name in ("a.pth", "a.sharded", "was-never-there.pth"):
        remove_checkpoint(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["..", ".", "", "data", "../other.sharded", "../a.pth", "{}/other.sharded"])
def test_remove_checkpoint_only_removes_checkpoints_in_its_folder(tmp_path, name):
    """A resumed run removes the old checkpoints that the loaded checkpoint lists, so the names are untrusted."""
    work_dir = tmp_path / "run"
    for folder in (work_dir / "data", tmp_path / "other.sharded"):
        folder.mkdir(parents=True)
    (tmp_path / "a.pth").touch()
    before = sorted(tmp_path.rglob("*"))
    remove_checkpoint(work_dir, name.format(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
