"""Fixtures for tests of `slipstream.tune`."""

from typing import ClassVar

import pytest
from fakes import FakeProcess

from slipstream.tune import batch_size, search


@pytest.fixture
def fake_process(monkeypatch):
    """Replace trial processes with scripted fakes, and check that each of them has been terminated."""

    class Counted(FakeProcess):
        requests: ClassVar = []

    monkeypatch.setattr(search, "Process", Counted)
    monkeypatch.setattr(batch_size, "Process", Counted)
    yield Counted
    assert Counted.started == Counted.ended


@pytest.fixture
def short_rounds(monkeypatch):
    """Shorten the rounds, and end a trial after the minimum number of rounds.

    The tests set large budgets because the machine may be busy.
    """
    monkeypatch.setattr(search, "_MAX_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(search, "_ROUNDS_FRACTION", 0.0)
