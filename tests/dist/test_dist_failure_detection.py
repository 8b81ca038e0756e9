import socket

import pytest

from slipstream.dist.failure_detection import Watch, _is_echo, _listen


@pytest.fixture
def address(monkeypatch):
    """Where the watch of a rank 0 listens."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("slipstream.dist.failure_detection.dist.get_world_size", lambda: 2)
    listener, hosts = _listen()
    assert hosts == ["127.0.0.1"], "a job of one machine listens on no network"
    where = listener.getsockname()
    watch = Watch(0, "secret", listener)
    yield where
    watch.leave()


def say(address, text):
    sock = socket.create_connection(address, timeout=20)
    sock.sendall(text)
    return sock


@pytest.mark.parametrize("hello", [b"", b"wrong 1\n", b"secret\n", b"failed 1 lie\n", b"bye\n", b"x" * 200])
def test_strangers_are_sent_away_and_end_nothing(address, hello):
    with say(address, hello) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    with say(address, b"secret 1\n") as rank:
        assert rank.recv(100) == b"welcome\n"
        rank.sendall(b"bye\n")
        assert rank.recv(100) == b""


def test_what_comes_in_pieces_is_understood(address):
    with say(address, b"sec") as rank:
        rank.sendall(b"ret 1")
        rank.sendall(b"\nbye\n")
        assert rank.recv(8) == b"welcome\n"
        assert rank.recv(100) == b""


def test_only_errors_of_connections_count_as_echoes():
    broken = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    assert _is_echo(broken)
    own = ValueError("own")
    assert not _is_echo(own)
    own.__cause__ = broken
    assert _is_echo(own)
    assert not _is_echo(RuntimeError("shape mismatch"))
