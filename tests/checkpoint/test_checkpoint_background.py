"""Test that a checkpoint written in the background contains the state at the time of the call to `write`."""

import errno
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slipstream.checkpoint import background, load_checkpoint, sharded
from slipstream.checkpoint.background import BackgroundWriter
from slipstream.errors import CheckpointError


@pytest.fixture
def writer():
    writer = BackgroundWriter()
    yield writer
    writer.close()


@pytest.fixture
def held(monkeypatch):
    """An event that every write waits for."""
    event, write = threading.Event(), background.write_checkpoint

    def waiting(*args, **kwargs):
        assert event.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(background, "write_checkpoint", waiting)
    yield event
    event.set()


def test_changes_after_the_call_are_not_saved(tmp_path, writer, held):
    weight = torch.nn.Parameter(torch.ones(3, 4, 2, 2).to(memory_format=torch.channels_last))
    state = {"weight": weight, "tied": weight, "steps": [1], "expanded": torch.ones(1).expand(5)}
    saved = []
    writer.write(state, tmp_path / "a.pth", pytest.fail, saved.append)
    with torch.no_grad():
        weight.zero_()
    state["steps"].append(2)
    held.set()
    writer.wait()
    assert saved == [tmp_path / "a.pth"]
    content = load_checkpoint(tmp_path / "a.pth")
    assert content["weight"].equal(torch.ones(3, 4, 2, 2))
    assert content["weight"].stride() == weight.stride()
    assert content["weight"].data_ptr() == content["tied"].data_ptr()
    assert content["steps"] == [1]
    assert content["expanded"].tolist() == [1] * 5


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_changes_to_shards_after_the_call_are_not_saved(tmp_path, writer, held, mesh):
    weight = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    for number in range(3):  # the second and third checkpoints reuse the first one's copies
        held.clear()
        weight.fill_(number)
        writer.write({"weight": weight, "tied": weight}, tmp_path / f"{number}.pth", pytest.fail, str)
        weight.fill_(-1)
        held.set()
        writer.wait()
    for number in range(3):
        content = load_checkpoint(tmp_path / f"{number}.sharded")
        assert content["weight"].equal(torch.full((6, 2), float(number)))
        assert content["tied"].equal(content["weight"])


def test_error_in_a_write_is_raised_once_by_the_next_call(tmp_path, writer):
    (tmp_path / "taken.pth").mkdir()
    writer.write({"a": torch.ones(1)}, tmp_path / "taken.pth", pytest.fail, pytest.fail)
    with pytest.raises(CheckpointError, match=r"taken\.pth cannot be written"):
        writer.write({"a": torch.ones(1)}, tmp_path / "next.pth", pytest.fail, pytest.fail)
    writer.wait()
    assert not (tmp_path / "next.pth").exists()


@pytest.mark.parametrize("failing", ["rank_0.pth", "plain.pth"])
def test_failed_sharded_checkpoint_leaves_no_folder(tmp_path, monkeypatch, mesh, failing):
    save = sharded.save_checkpoint

    def full(content, path, warn):
        if path.name == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(content, path, warn)

    monkeypatch.setattr(sharded, "save_checkpoint", full)
    weight = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    with pytest.raises(CheckpointError, match=rf"a.sharded cannot be written: .*No space left .*{failing}"):
        sharded.write_checkpoint({"weight": weight}, tmp_path / "a.pth", pytest.fail)
    assert list(tmp_path.iterdir()) == []
