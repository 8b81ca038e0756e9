"""Tests of weights from URLs and run folders: downloads, checksums and errors. HTTP servers listen on 127.0.0.1."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from slipstream.checkpoint import local_checkpoint, mark_last_checkpoint
from slipstream.errors import CheckpointError, ConfigError
from slipstream.zoo import models


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Return a network, the bytes of its checkpoint, and their checksum. The user's cache is empty."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    network = models.get("resnet18_cifar", 3)
    torch.save({"net": network.state_dict()}, tmp_path / "source.pth")
    data = (tmp_path / "source.pth").read_bytes()
    return network, data, hashlib.sha256(data).hexdigest()


@pytest.fixture
def memory():
    """Return fsspec's in-memory file system, which is initially empty."""
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


@pytest.fixture
def server():
    """Start a server. Return its URL and a dict that maps paths to contents. Other paths return status 404."""
    files = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            data = files.get(self.path.partition("?")[0])
            self.send_response(200 if data is not None else 404)
            if self.path.endswith("?short"):
                self.send_header("Content-Length", str(len(data) + 7))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *arguments):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", files
    listening.shutdown()
    listening.server_close()
    thread.join()


def same(network, other):
    torch.testing.assert_close(network.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_weights_are_loaded_from_an_fsspec_file_system(weights, memory, tmp_path):
    network, data, _ = weights
    memory.pipe_file("/bucket/w.pth", data)
    same(models.get("resnet18_cifar", 3, checkpoint_path="memory://bucket/w.pth"), network)
    with local_checkpoint("memory://bucket/w.pth") as file:
        assert file.read_bytes() == data
    assert not file.exists()
    assert not (tmp_path / "cache").exists()  # a file without a checksum is not cached


def test_a_file_with_a_checksum_is_cached_and_read_without_a_network(weights, server):
    network, data, checksum = weights
    url, files = server
    files["/w.pth"] = data
    for _ in range(2):
        loaded = models.get(
            "resnet18_cifar", 3, checkpoint_path=f"{url}/w.pth", checkpoint_sha256=checksum.upper()
        )
        same(loaded, network)
        files.clear()
    with local_checkpoint(f"{url}/w.pth", checksum) as file:
        kept = file
    kept.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="404"), local_checkpoint(f"{url}/w.pth", checksum):
        pass
    files["/w.pth"] = data
    with local_checkpoint(f"{url}/w.pth", checksum) as file:
        assert file.read_bytes() == data


@pytest.mark.parametrize("place", ["memory", "file"])
def test_a_wrong_checksum_raises_an_error_and_no_file_is_cached(weights, memory, tmp_path, place):
    _, data, checksum = weights
    memory.pipe_file("/w.pth", data)
    path = "memory://w.pth" if place == "memory" else tmp_path / "source.pth"
    wanted = "0" * 64
    with pytest.raises(
        CheckpointError, match=f"is {checksum}, but checkpoint_params.checkpoint_sha256 is {wanted}"
    ):
        models.get("resnet18_cifar", 3, checkpoint_path=path, checkpoint_sha256=wanted)
    assert not list((tmp_path / "cache").rglob("*.pth"))
    with pytest.raises(ConfigError, match="must be 64 hexadecimal digits") as error:
        models.get("resnet18_cifar", 3, checkpoint_path=path, checkpoint_sha256="abc")
    assert error.value.path == "checkpoint_params.checkpoint_sha256"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "http://user:secret@127.0.0.1:9/w.pth?signature=secret",
            "http://127.0.0.1:9/w.pth cannot be downloaded",
        ),
        ("memory://nothing.pth", "memory://nothing.pth cannot be downloaded"),
        ("unknown://host/w.pth", "Protocol not known: unknown"),
    ],
)
def test_a_failed_download_error_is_one_line_without_secrets(url, reason):
    with pytest.raises(CheckpointError) as error:
        models.get("resnet18_cifar", 3, checkpoint_path=url)
    text = str(error.value)
    assert reason in text
    assert text.endswith("or download the file on another machine and set checkpoint_path to it")
    assert "\n" not in text
    assert "secret" not in text


def test_a_run_folder_provides_its_best_or_latest_checkpoint(weights, tmp_path):
    network, data, checksum = weights
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="run contains no checkpoint"):
        models.get("resnet18_cifar", 3, checkpoint_path=folder)
    (folder / "ckpt_latest.pth").write_bytes(data)
    mark_last_checkpoint(folder, folder / "ckpt_latest.pth")
    same(models.get("resnet18_cifar", 3, checkpoint_path=folder, checkpoint_sha256=checksum), network)
    other = models.get("resnet18_cifar", 3)
    torch.save(other.state_dict(), folder / "ckpt_best.pth")
    same(models.get("resnet18_cifar", 3, checkpoint_path=str(folder)), other)
