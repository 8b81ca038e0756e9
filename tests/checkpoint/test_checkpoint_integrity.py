"""Test that damage to a checkpoint file is detected."""

import os
import random
import zipfile
from contextlib import suppress

import pytest
import torch

from slipstream.checkpoint import integrity, load_checkpoint, save_checkpoint
from slipstream.checkpoint.integrity import open_verified, verify
from slipstream.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint's contents and the bytes of its file."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer{i}.weight": torch.randn(64, 64, generator=generator) for i in range(8)}
    content = {"meta": {"iter": 3, "epoch": 1, "cfg": "lr: 0.1\n" * 20}, "state_dict": weights}
    path = tmp_path_factory.mktemp("saved") / "a.pth"
    save_checkpoint(content, path, pytest.fail)
    return content, path.read_bytes()


def assert_detected(damaged, content, path):
    """Check that loading raises an error, or returns the original content if the damaged bytes are never read."""
    path.write_bytes(damaged)
    with suppress(CheckpointError):
        found = load_checkpoint(path)
        assert found["meta"] == content["meta"]
        torch.testing.assert_close(found["state_dict"], content["state_dict"], rtol=0, atol=0)


def spots(size, count=150):
    """Return positions throughout a file, most of them near its start or end."""
    draw = random.Random(0)
    ranges = [(0, size), (0, 2000), (size - 3000, size)]
    return [draw.randrange(*limits) for limits in ranges for _ in range(count)]


def test_flipped_bits_are_detected(saved, tmp_path):
    content, good = saved
    for number, spot in enumerate(spots(len(good))):
        damaged = bytearray(good)
        damaged[spot] ^= 1 << number % 8
        assert_detected(bytes(damaged), content, tmp_path / "a.pth")


def test_file_saved_by_torch_without_checksums_is_not_reported_as_damaged(saved, tmp_path):
    content, _ = saved
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(computes)
    verify(tmp_path / "a.pth")
    torch.testing.assert_close(load_checkpoint(tmp_path / "a.pth")["state_dict"], content["state_dict"])


def test_two_archives_in_one_file_are_detected(saved, tmp_path):
    """torch reads the entries in the first archive, and `ZipFile` reads the entries in the second one."""
    _, good = saved
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 1
    (tmp_path / "a.pth").write_bytes(bytes(damaged) + good)
    with pytest.raises(CheckpointError, match="other data precedes the first entry"):
        load_checkpoint(tmp_path / "a.pth")


def test_zeroed_sectors_are_detected(saved, tmp_path):
    content, good = saved
    for start in range(0, len(good), 4096):
        damaged = good[:start] + bytes(len(good[start : start + 512])) + good[start + 512 :]
        assert_detected(damaged, content, tmp_path / "a.pth")


def test_truncated_files_are_detected(saved, tmp_path):
    _, good = saved
    path = tmp_path / "a.pth"
    for size in (0, 1, 100, *range(1000, len(good), 5003), len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"a\.pth"):
            load_checkpoint(path)


def test_error_names_the_file_and_the_entry(saved, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(saved[1])
    with zipfile.ZipFile(path) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("data/3"))
    damaged = bytearray(saved[1])
    damaged[entry.header_offset + 5000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=rf"{path} is damaged: the checksum of {entry.filename} does not match"
    ):
        load_checkpoint(path)


@pytest.fixture
def small_chunks(monkeypatch):
    """Read each weight in several chunks, as is otherwise done only for large weights."""
    monkeypatch.setattr(integrity, "_CHUNK", 1000)


@pytest.mark.usefixtures("small_chunks")
def test_weights_that_are_read_in_chunks_are_equal(saved, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(saved[1])
    found = load_checkpoint(path)
    torch.testing.assert_close(found["state_dict"], saved[0]["state_dict"], rtol=0, atol=0)
    verify(path)


@pytest.mark.usefixtures("small_chunks")
def test_damage_in_each_chunk_is_detected(saved, tmp_path):
    path = tmp_path / "a.pth"
    weight = saved[0]["state_dict"]["layer5.weight"].numpy().tobytes()
    start = saved[1].index(weight)
    for spot in range(start, start + len(weight), 900):
        damaged = bytearray(saved[1])
        damaged[spot] ^= 4
        path.write_bytes(damaged)
        for read in (load_checkpoint, verify):
            with pytest.raises(CheckpointError, match=r"data/5 does not match"):
                read(path)


@pytest.mark.parametrize("chunk", [1000, 2**22], ids=["threads", "one read"])
def test_file_that_is_truncated_while_it_is_read_raises_an_error(saved, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(integrity, "_CHUNK", chunk)
    path = tmp_path / "a.pth"
    path.write_bytes(saved[1])
    weight = saved[0]["state_dict"]["layer5.weight"].numpy().tobytes()

    def load():
        with open_verified(path) as file:
            file.seek(saved[1].index(weight))
            os.truncate(path, file.tell() + 5000)
            file.read(len(weight))

    with pytest.raises(
        CheckpointError, match=rf"{path} is damaged: it was truncated while it was being read"
    ):
        load()


def test_entries_that_are_not_loaded_are_verified(saved, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(saved[1])
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/extra", b"note" * 100)
    load_checkpoint(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"notenote", b"notenoce", 1))
    with pytest.raises(CheckpointError, match=r"/extra does not match"):
        load_checkpoint(path)


def test_files_without_checksums_are_not_verified(tmp_path):
    path = tmp_path / "old.pth"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    verify(path)
    assert torch.equal(load_checkpoint(path)["a"], torch.ones(2))


def test_part_of_a_file_is_verified_separately(saved, tmp_path):
    path = tmp_path / "parts"
    damaged = bytearray(saved[1])
    damaged[8000] ^= 1
    path.write_bytes(saved[1] + bytes(damaged) + saved[1])
    size = len(damaged)
    verify(path, 0, size)
    verify(path, 2 * size, size)
    with pytest.raises(CheckpointError, match="checksum"):
        verify(path, size, size)
