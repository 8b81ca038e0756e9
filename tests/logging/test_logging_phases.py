"""Tests of PhaseTimes, which measures the duration of a run's phases."""

from time import perf_counter, sleep

import pytest

from slipstream.logging import PhaseTimes


@pytest.fixture
def ticks(monkeypatch):
    """Return a list of times. Each call to the timer's clock removes the first time and returns it."""
    times = []
    monkeypatch.setattr("slipstream.logging.phases.perf_counter", lambda: times.pop(0))
    return times


def test_each_phase_has_the_time_until_the_next_switch(ticks):
    ticks += [10.0, 11.0, 13.0, 17.0]
    phases = PhaseTimes()
    phases.start()
    phases.switch("data")
    phases.switch("step")
    phases.stop()
    assert phases.seconds == {"other": 1.0, "data": 2.0, "step": 4.0}


def test_nested_blocks_do_not_count_time_twice(ticks):
    ticks += [0.0, 1.0, 3.0, 7.0, 15.0, 31.0]
    phases = PhaseTimes()
    phases.start()
    with phases.during("validation"), phases.during("checkpoint"):
        pass
    phases.stop()
    assert phases.seconds == {"other": 1.0 + 16.0, "validation": 2.0 + 8.0, "checkpoint": 4.0}
    assert sum(phases.seconds.values()) == 31.0


def test_first_step_is_separate_from_the_others(ticks):
    ticks += [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0]
    phases = PhaseTimes()
    phases.start()  # 0
    phases.switch("data")  # 1
    phases.switch("step")  # 3
    phases.end_step()  # 7
    phases.switch("step")  # 15
    phases.end_step()  # 31
    phases.stop()  # 63
    assert phases.steps == 2
    assert phases.first == {"data": 2.0, "step": 4.0}
    assert phases.total("data") == 2.0 + phases.seconds["data"]
    assert phases.seconds == {"other": 1.0, "data": 8.0 + 32.0, "step": 16.0}


def test_time_between_two_runs_is_not_counted():
    phases = PhaseTimes()
    phases.start()
    phases.stop()
    before = sum(phases.seconds.values())
    sleep(0.01)
    phases.switch("data")
    assert sum(phases.seconds.values()) == before
    start = perf_counter()
    phases.start()
    phases.stop()
    assert sum(phases.seconds.values()) - before <= perf_counter() - start
