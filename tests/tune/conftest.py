"""Fixtures for tests of `slipstream.tune`."""

import pytest
from fakes import FakeProcess

from slipstream.tune import batch_size, search


@pytest.fixture
def fake_process(monkeypatch):
    """Replace the processes of trials by scripts, and check that all of them are ended."""

    class Counted(FakeProcess):
        pass

    monkeypatch.setattr(search, "Process", Counted)
    monkeypatch.setattr(batch_size, "Process", Counted)
    yield Counted
    assert Counted.started == Counted.ended
