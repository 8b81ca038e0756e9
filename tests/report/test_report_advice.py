"""Recommendations and their bounds."""

import pytest
from records import record

from slipstream.report import PhaseSplit
from slipstream.report.advice import advice


def split(steps=100, **seconds):
    return PhaseSplit(seconds, {}, steps)


def test_bound_is_the_time_without_the_phase():
    (found,) = advice(record(phases=split(data=34.0, forward=66.0)))
    assert found.share == pytest.approx(0.34)
    assert found.bound == pytest.approx(100 / 66)
    assert "34% of the training time waits for data; at most 1.52x" in found.text
    assert "num_workers is 2" in found.text


def test_start_of_the_run_and_test_do_not_change_the_share():
    (found,) = advice(record(phases=split(data=34.0, forward=66.0, other=500.0, test=70.0)))
    assert found.share == pytest.approx(0.34)


def test_bound_is_rounded_up():
    (found,) = advice(record(phases=split(data=10.0, forward=90.0)))
    assert found.bound == pytest.approx(1.1111, abs=1e-4)
    assert "at most 1.12x" in found.text


def test_largest_share_is_first():
    found = advice(record(phases=split(data=10.0, hooks=20.0, validation=30.0, checkpoint=5.0, forward=35.0)))
    shares = [item.share for item in found]
    assert len(found) == 4
    assert shares == sorted(shares, reverse=True)


def test_nothing_is_recommended_for_computation():
    assert advice(record(phases=split(forward=50.0, backward=50.0))) == []
    assert advice(record(phases=split(step=100.0))) == []


def test_few_steps_give_no_recommendation():
    assert advice(record(phases=split(steps=10, data=50.0, forward=50.0))) == []
    assert advice(record(phases=PhaseSplit())) == []


def test_wait_for_an_accelerator_is_not_called_logging():
    phases = split(logging=50.0, optimizer=30.0, forward=20.0)
    assert {item.problem for item in advice(record(phases=phases))} == {
        "is spent in reading losses and in log lines",
        "is spent in the optimizer",
    }
    on_gpu = record(phases=phases, settings={"device": "cuda", "fused": False})
    assert advice(on_gpu) == []


def test_prefetch_is_recommended_only_where_it_helps():
    phases = split(preprocess=50.0, forward=50.0)
    texts = [
        advice(record(phases=phases, settings=each))[0].text
        for each in ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "prefetch": 2})
    ]
    assert ["prefetch=2" in text for text in texts] == [False, True, False]


def test_background_writes_are_recommended_only_if_they_are_off():
    phases = split(checkpoint=50.0, forward=50.0)
    texts = [advice(record(phases=phases, settings={"async_save": on}))[0].text for on in (False, True, None)]
    assert ["async_save=True" in text for text in texts] == [True, False, False]
