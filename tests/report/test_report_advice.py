"""Tests of the report's recommendations and their upper bounds on the speedup."""

import pytest
from records import record

from slipstream.report import PhaseSplit
from slipstream.report.advice import advice, tuned_text, waits_for_data
from slipstream.report.record import LoadingRate, TunedOptions


def split(steps=100, **seconds):
    return PhaseSplit(seconds, {}, steps)


def test_bound_assumes_that_the_phase_takes_no_time():
    (found,) = advice(record(phases=split(data=34.0, forward=66.0)))
    assert found.share == pytest.approx(0.34)
    assert found.bound == pytest.approx(100 / 66)
    assert found.text.startswith(
        "34% of the training time is spent waiting for data. Eliminating this time would speed up"
    )
    assert "training by a factor of at most 1.52." in found.text
    assert "num_workers is 2" in found.text


def test_startup_and_testing_time_do_not_change_the_share_of_a_phase():
    (found,) = advice(record(phases=split(data=34.0, forward=66.0, other=500.0, test=70.0)))
    assert found.share == pytest.approx(0.34)


def test_bound_is_rounded_up():
    (found,) = advice(record(phases=split(data=10.0, forward=90.0)))
    assert found.bound == pytest.approx(1.1111, abs=1e-4)
    assert "a factor of at most 1.12." in found.text


def test_recommendation_for_the_largest_share_is_first():
    found = advice(record(phases=split(data=10.0, hooks=20.0, validation=30.0, checkpoint=5.0, forward=35.0)))
    shares = [item.share for item in found]
    assert len(found) == 4
    assert shares == sorted(shares, reverse=True)


def test_nothing_is_recommended_for_computation():
    assert advice(record(phases=split(forward=50.0, backward=50.0))) == []
    assert advice(record(phases=split(step=100.0))) == []


def test_nothing_is_recommended_after_only_a_few_steps():
    assert advice(record(phases=split(steps=10, data=50.0, forward=50.0))) == []
    assert advice(record(phases=PhaseSplit())) == []


def test_waiting_for_an_accelerator_is_not_reported_as_logging():
    phases = split(logging=50.0, optimizer=30.0, forward=20.0)
    assert {item.problem for item in advice(record(phases=phases))} == {
        "is spent reading losses and writing log lines",
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


def probed(rates, **changes):
    """Return the advice for a run that loads 100 samples/s with two workers and waits for data half of the time."""
    phases = PhaseSplit({"data": 10.0, "forward": 10.0}, {}, 100, 2000)
    found = [LoadingRate(count, rate) for count, rate in rates.items()]
    (item,) = advice(record(phases=phases, loading_rates=found, **changes))
    return item.text


def test_expected_speedup_is_limited_by_the_loader():
    text = probed({0: 60.0, 1: 55.0, 2: 104.0, 4: 140.0})
    assert "would speed up training by a factor of at most 2.00" in text
    assert "(samples/s by num_workers: 0: 60, 1: 55, 2: 104, 4: 140); training reached 100" in text
    assert "With num_workers=4, training would speed up by a factor of at most 1.40" in text


def test_expected_speedup_is_limited_by_the_steps_without_waiting():
    text = probed({0: 60.0, 2: 104.0, 4: 190.0, 8: 900.0})
    # Without waiting, 2000 samples take 10 s. 8 workers reach this speed, and 4 workers come within 5% of it.
    assert "With num_workers=4, training would speed up by a factor of at most 1.90" in text


def test_expected_speedup_takes_the_validation_time_into_account():
    phases = PhaseSplit({"data": 10.0, "forward": 10.0, "validation": 20.0}, {}, 100, 2000)
    rates = [LoadingRate(2, 104.0), LoadingRate(4, 160.0)]
    found = [item.text for item in advice(record(phases=phases, loading_rates=rates))]
    # Validation takes 20 s. At 160 samples/s, 2000 training samples take 12.5 s instead of 20 s.
    assert "With num_workers=4, training would speed up by a factor of at most 1.24." in "".join(found)


def test_probe_that_finds_no_faster_number_of_workers_recommends_other_remedies():
    text = probed({0: 60.0, 1: 90.0, 2: 104.0})
    assert "No measured worker count is significantly faster than num_workers=2." in text
    assert "decode-once cache" in text


def test_probe_compares_with_loading_in_the_main_process():
    text = probed({0: 60.0, 1: 150.0}, settings={"device": "cpu", "num_workers": 0})
    assert "With num_workers=1, training would speed up by a factor of at most 1.50" in text


def test_probe_that_did_not_measure_the_current_number_of_workers_is_not_used():
    assert "probe" not in probed({0: 60.0, 1: 150.0})


def test_waiting_is_reported_if_it_takes_at_least_five_percent_of_the_time():
    assert waits_for_data(record(phases=split(data=5.0, forward=95.0)))
    assert not waits_for_data(record(phases=split(data=4.9, forward=95.1)))
    assert not waits_for_data(record(phases=split(steps=10, data=50.0, forward=50.0)))


def test_text_for_a_result_of_tune_states_what_was_measured():
    found = TunedOptions(["channels_last", "compile=step"], 1.35, 1.3, 1.4, False)
    text = tuned_text(record(tuned=[found]))
    assert (
        "channels_last + compile=step, training steps run 1.35 times as fast as without these options (1.30 to 1.40;"
        in text
    )
    found.is_product = True
    assert "(the product of the ratios measured for each option; validation is not" in tuned_text(
        record(tuned=[found])
    )
    assert tuned_text(record()) == ""
