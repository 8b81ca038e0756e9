"""Tests of the record, the curves, the recommendations and the page of a run."""

import math
from dataclasses import asdict

import pytest
from records import curve, record, text_of

from slipstream.report import Curve, PhaseSplit, RunRecord, read_run, write_report
from slipstream.report.advice import advice, tuning
from slipstream.report.chart import line_chart
from slipstream.report.files import flat_config
from slipstream.report.page import page
from slipstream.report.record import Confusion, LogMessage, OptionRow

EVIL = "<script>alert(1)</script>&\"'"


def test_long_curve_keeps_its_mean_its_extremes_and_its_latest_value():
    values = [50.0, *([40.0, 60.0] * 3000), 12.5]
    values[700], values[900] = 99.25, math.nan
    made = curve(values)
    assert len(made.x) < 1000
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(n * m for n, m in zip(made.count, made.mean, strict=True)) / sum(made.count)
    assert mean == pytest.approx(sum(finite) / len(finite))
    assert (made.lowest(), made.highest(), made.newest, made.bad, made.x[-1]) == (
        12.5,
        99.25,
        12.5,
        1,
        len(values),
    )


def test_truncated_curve_ends_at_the_iteration():
    made = curve([1.0, 2.0, 3.0])
    made.truncate(2)
    assert (made.x, made.newest) == ([1, 2], 2.0)


def test_record_is_read_as_it_was_written(tmp_path):
    made = record(
        curves={"val/mIoU": curve([10.0, math.nan])},
        confusions=[Confusion("IoUMetric", "val", 3, ["a"], [[1]])],
        options=[OptionRow("ema", "on", "speed.ema")],
        messages=[LogMessage("now", "WARNING", "text")],
    )
    write_report(made, tmp_path)
    read = read_run(tmp_path)
    assert math.isnan(read.curves["val/mIoU"].newest)
    read.curves["val/mIoU"].newest = made.curves["val/mIoU"].newest = None
    assert asdict(read) == asdict(made)


def test_configuration_is_flat():
    nested = {"a": {"b": [1, 2], "c": [{"d": print}, None]}, "e": {}, "f": float("inf"), "g": object()}
    assert flat_config(nested) == {
        "a.b": [1, 2], "a.c.0.d": "builtins.print", "a.c.1": None, "e": "<dict object>", "f": "inf",
        "g": "<object object>",
    }  # fmt: skip


def split(steps=100, **seconds):
    return PhaseSplit(seconds, {}, steps)


def test_bound_assumes_that_the_phase_takes_no_time():
    (found,) = advice(record(phases=split(data=34.0, forward=66.0, other=500.0, test=70.0)))
    assert found.share == pytest.approx(0.34)
    assert "at most 1.52." in found.text  # 100 / 66 = 1.515, rounded up
    found = advice(record(phases=split(data=10.0, hooks=20.0, validation=30.0, checkpoint=5.0, forward=35.0)))
    assert [item.share for item in found] == pytest.approx([0.3, 0.2, 0.1, 0.05])


def test_nothing_is_recommended_for_computation_or_after_a_few_steps():
    assert advice(record(phases=split(forward=50.0, backward=50.0))) == []
    assert advice(record(phases=split(steps=10, data=50.0, forward=50.0))) == []
    on_gpu = {"device": "cuda", "fused": False}  # the host waits for the device when it reads losses
    assert advice(record(phases=split(logging=50.0, optimizer=30.0), settings=on_gpu)) == []


def test_options_to_tune_are_listed_with_their_bounds_and_the_command():
    settings = {"device": "cpu", "num_workers": 2, "fused": True, "config": "my_recipe"}
    used = [OptionRow("channels_last", "on", "speed"), OptionRow("precision", "off", "auto")]
    phases = split(data=10.0, forward=30.0, backward=50.0, optimizer=10.0)
    text = tuning(record(phases=phases, settings=settings, options=used))
    assert "compile (90%), precision (80%), num_workers (10%)." in text
    assert text.endswith("slipstream tune my_recipe --options compile,precision,num_workers")
    assert text in text_of(page(record(phases=phases, settings=settings, options=used)))
    assert tuning(record(phases=phases, settings={**settings, "device": "cuda"})) == ""
    compiled = [OptionRow("compile", "scope=step", "speed")]
    assert tuning(record(phases=phases, settings=settings, options=compiled)) == ""


def test_page_shows_the_results_and_the_time_of_each_phase():
    text = text_of(page(record()))
    for part in ("a_run", "finished", "val/mIoU 20 lowest 10, highest 30", "train/loss", "waiting for data",
                 "33.3%", "at most 1.50", "optim_wrapper.optimizer.lr"):  # fmt: skip
        assert part in text, part


def test_all_text_of_a_run_is_escaped(tmp_path):
    evil = record(
        name=EVIL,
        error=EVIL,
        status="failed",
        environment={EVIL: EVIL},
        settings={"device": EVIL, "num_workers": EVIL},
        step=EVIL,
        curves={f"train/{EVIL}": curve([1.0, math.nan]), f"val/{EVIL}": curve([1.0])},
        confusions=[Confusion(EVIL, EVIL, 3, [EVIL, "b"], [[1, 2], [3, 4]])],
        options=[OptionRow(EVIL, EVIL, EVIL, EVIL)],
        messages=[LogMessage(EVIL, EVIL, EVIL)],
        config={EVIL: EVIL},
    )
    html = page(evil, tmp_path)
    assert "<script" not in html
    assert text_of(html).count("<script>") >= 14


def test_page_of_an_empty_record_is_complete():
    for status in ("finished", "interrupted", "failed", "incomplete"):
        assert "empty" in text_of(page(RunRecord("empty", status)))


def test_nan_interrupts_the_line_and_is_not_drawn():
    assert line_chart("loss", curve([1, 2, math.nan, 3, 2])).count("<polyline") == 2
    assert line_chart("loss", curve([math.nan, math.inf])) == line_chart("loss", Curve()) == ""
    for values in ([5.0, 5.0], [-1e300, 1e300], [-3.0]):
        svg = line_chart("c", curve(values))
        assert "nan" not in svg
        assert "inf" not in svg


def test_class_table_matches_the_confusion_matrix():
    confusion = Confusion("IoUMetric", "val", 7, ["road", "sky", "car"], [[6, 2, 0], [0, 4, 0], [0, 0, 0]])
    text = text_of(page(record(confusions=[confusion])))
    for row in (
        "road 66.7 75.0 100.0 75.0 8",
        "sky 33.3 66.7 66.7 100.0 4",
        "car 0.0 – – – 0",
        "road sky 2 25.0",
    ):
        assert row in text, row
