"""Test that a checkpoint written in the background contains the state at the time of the call to `write`."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slipstream.checkpoint import background, copies, load_checkpoint
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


def test_next_checkpoint_reuses_the_copies_after_the_previous_write(tmp_path, writer):
    weight, other = torch.zeros(3), torch.zeros(2)
    for number in range(3):
        weight.fill_(number)
        writer.write(
            {"weight": weight, "other": other[number:]}, tmp_path / f"{number}.pth", pytest.fail, str
        )
    writer.wait()
    for number in range(3):
        content = load_checkpoint(tmp_path / f"{number}.pth")
        assert content["weight"].tolist() == [number] * 3
        assert len(content["other"]) == 2 - number


def test_error_in_a_write_is_raised_once_by_the_next_call(tmp_path, writer):
    (tmp_path / "taken.pth").mkdir()
    writer.write({"a": torch.ones(1)}, tmp_path / "taken.pth", pytest.fail, pytest.fail)
    with pytest.raises(CheckpointError, match=r"taken\.pth cannot be written"):
        writer.write({"a": torch.ones(1)}, tmp_path / "next.pth", pytest.fail, pytest.fail)
    writer.wait()
    assert not (tmp_path / "next.pth").exists()


def test_equally_named_keys_and_different_views_are_copied_separately(tmp_path, writer):
    base = torch.complex(torch.ones(2), torch.ones(2))
    content = {1: torch.zeros(2), "1": torch.ones(2), "z": base, "c": base.conj()}
    for number in range(2):
        writer.write(content, tmp_path / f"{number}.pth", pytest.fail, str)
    writer.wait()
    for number in range(2):
        saved = load_checkpoint(tmp_path / f"{number}.pth")
        assert saved[1].tolist() == [0, 0]
        assert saved["1"].tolist() == [1, 1]
        assert torch.equal(saved["c"], saved["z"].conj())


def test_first_write_in_inference_mode_does_not_prevent_the_next(tmp_path, writer):
    with torch.inference_mode():
        writer.write({"a": torch.ones(2)}, tmp_path / "0.pth", pytest.fail, str)
    writer.write({"a": torch.zeros(2)}, tmp_path / "1.pth", pytest.fail, str)
    writer.wait()
    assert load_checkpoint(tmp_path / "1.pth")["a"].tolist() == [0, 0]


def test_tensor_subclasses_and_tensors_with_attributes_are_saved_as_plain_tensors(tmp_path, writer):
    class Image(torch.Tensor):
        pass

    named = torch.ones(2)
    named.note = object()
    writer.write(
        {"image": torch.ones(2).as_subclass(Image), "named": named}, tmp_path / "a.pth", pytest.fail, str
    )
    writer.wait()
    saved = load_checkpoint(tmp_path / "a.pth")
    assert type(saved["image"]) is type(saved["named"]) is torch.Tensor


def test_sparse_tensors_are_copied(tmp_path, writer, held):
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "bsr": dense.to_sparse_bsr((1, 1))}
    writer.write(state, tmp_path / "a.pth", pytest.fail, str)
    for tensor in state.values():
        tensor.values().zero_()
    held.set()
    writer.wait()
    saved = load_checkpoint(tmp_path / "a.pth")
    assert all(saved[name].layout is tensor.layout for name, tensor in state.items())
    assert all(value.to_dense().equal(dense) for value in saved.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_that_are_copied_in_chunks_are_equal(tmp_path, writer, monkeypatch, threads):
    monkeypatch.setattr(copies, "_CHUNK", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    content = {
        "contiguous": random(13, 7),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": random(9, 8).t(),
        "part of a larger tensor": random(20, 10)[3:15, 2:7],
        "rows": random(20, 10)[5:15],
        "every second": random(100)[::2],
        "bfloat16": random(50, dtype=torch.bfloat16),
        "bool": random(90) > 0,
        "complex": torch.complex(random(11), random(11)),
        "conjugated": torch.complex(random(11), random(11)).conj(),
        "imaginary part": torch.complex(random(40), random(40)).conj().imag,
        "expanded": random(1).expand(60),
        "empty": random(0, 3),
        "scalar": random(),
    }
    expected = {name: tensor.clone() for name, tensor in content.items()}
    for number in range(2):
        writer.write(content, tmp_path / "a.pth", pytest.fail, str)
        writer.wait()
        for tensor in content.values():
            tensor.detach().zero_() if tensor.stride() != (0,) else None
        saved = load_checkpoint(tmp_path / "a.pth")
        for name, tensor in expected.items():
            torch.testing.assert_close(
                saved[name], tensor, rtol=0, atol=0, msg=f"{name} differs in write {number}"
            )
        for name, tensor in content.items():
            if tensor.stride() != (0,):
                tensor.copy_(expected[name])


def test_error_in_a_copying_thread_is_raised(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(copies, "_CHUNK", 8)

    def fails(target, source):
        raise MemoryError("no memory")

    monkeypatch.setattr(np, "copyto", fails)
    with pytest.raises(MemoryError, match="no memory"):
        copies.copy_in_threads([(torch.zeros(100), torch.ones(100))])
