from slipstream.dist.failure_detection import is_consequence


def test_only_connection_errors_are_consequences_of_another_failure():
    broken = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    assert is_consequence(broken)
    own = ValueError("own")
    assert not is_consequence(own)
    own.__cause__ = broken
    assert is_consequence(own)
    assert not is_consequence(RuntimeError("shape mismatch"))
