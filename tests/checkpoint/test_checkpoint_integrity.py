"""Test that damage to a checkpoint file is detected."""

import random
from contextlib import suppress

import pytest
import torch

from slipstream.checkpoint import load_checkpoint, save_checkpoint
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
    torch.testing.assert_close(load_checkpoint(tmp_path / "a.pth")["state_dict"], content["state_dict"])


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


def test_files_without_checksums_are_not_verified(tmp_path):
    path = tmp_path / "old.pth"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load_checkpoint(path)["a"], torch.ones(2))
