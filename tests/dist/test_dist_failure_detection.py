import socket

import pytest

from slipstream.dist.failure_detection import FailureDetector, _listen, is_consequence


@pytest.fixture
def address(monkeypatch):
    """Start the failure detector of rank 0 and return the address on which it listens."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("slipstream.dist.failure_detection.dist.get_world_size", lambda: 2)
    listener, hosts = _listen()
    assert hosts == ["127.0.0.1"], "a single-machine job listens on addresses other than loopback"
    address = listener.getsockname()
    detector = FailureDetector(0, "secret", listener)
    yield address
    detector.leave()


def send(address, text):
    sock = socket.create_connection(address, timeout=20)
    sock.sendall(text)
    return sock


@pytest.mark.parametrize("hello", [b"", b"wrong 1\n", b"secret\n", b"failed 1 lie\n", b"bye\n", b"x" * 200])
def test_invalid_first_message_closes_only_that_connection(address, hello):
    with send(address, hello) as client:
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    with send(address, b"secret 1\n") as rank:
        assert rank.recv(100) == b"welcome\n"
        rank.sendall(b"bye\n")
        assert rank.recv(100) == b""


def test_messages_can_arrive_in_several_packets(address):
    with send(address, b"sec") as rank:
        rank.sendall(b"ret 1")
        rank.sendall(b"\nbye\n")
        assert rank.recv(8) == b"welcome\n"
        assert rank.recv(100) == b""


def test_only_connection_errors_are_consequences_of_another_failure():
    broken = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    assert is_consequence(broken)
    own = ValueError("own")
    assert not is_consequence(own)
    own.__cause__ = broken
    assert is_consequence(own)
    assert not is_consequence(RuntimeError("shape mismatch"))
