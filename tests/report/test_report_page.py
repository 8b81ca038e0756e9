"""Tests of the HTML page of a run."""

import csv
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from records import curve, parsed, record, text_of

from slipstream.report import Curve, PhaseSplit, RunRecord, run_folder, write_report
from slipstream.report.comparison import compare, comparison_csv
from slipstream.report.page import duration, page
from slipstream.report.record import Compute, Confusion, Example, LogMessage, OptionRow, TunedOptions
from slipstream.report.svg import Line, line_chart
from slipstream.report.utilization import utilization
from slipstream.scalars import number

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
EVIL = "<script>alert(1)</script>&\"'"


def test_page_shows_the_results_and_the_time_of_each_phase():
    text = text_of(page(record()))
    for part in ("a_run", "finished", "val/mIoU", "lowest 10, highest 30", "train/loss", "waiting for data",
                 "33.3%", "at most 1.50", "optim_wrapper.optimizer.lr", "No warnings", "No speed option"):  # fmt: skip
        assert part in text, part


def test_tile_of_a_long_curve_shows_its_raw_values():
    """A curve of more than 1,000 values stores means, but the tile must show the exact last and extreme values."""
    values = [50.0, *([40.0, 60.0] * 600), 12.5]
    values[700] = 99.25
    text = text_of(page(record(curves={"val/mIoU": curve(values)})))
    assert "val/mIoU 12.5 lowest 12.5, highest 99.25" in text


def test_metric_whose_last_value_is_nan_is_shown_as_nan():
    text = text_of(page(record(curves={"val/mIoU": curve([10.0, math.nan]), "val/loss": curve([math.inf])})))
    assert "val/mIoU NaN lowest 10, highest 10, 1 NaN or infinite" in text
    assert "val/loss infinity" in text


def test_all_text_of_a_run_is_escaped():
    evil = record(
        name=EVIL,
        error=EVIL,
        status="failed",
        environment={EVIL: EVIL},
        settings={"device": EVIL, "num_workers": EVIL, "compile": True},
        step=EVIL,
        resumed_from=EVIL,
        curves={f"train/{EVIL}": curve([1.0, math.nan]), f"val/{EVIL}": curve([1.0])},
        confusions=[Confusion(EVIL, EVIL, 3, [EVIL, "b"], [[1, 2], [3, 4]])],
        examples=[Example(EVIL, EVIL, 0.5, DOT), Example(EVIL, EVIL, None, EVIL)],
        compute=Compute(1.0, 1.0, 2, EVIL, EVIL),
        tuned=[TunedOptions([EVIL], 1.5, 1.4, 1.6, False)],
        options=[OptionRow(EVIL, EVIL, EVIL, EVIL)],
        messages=[LogMessage(EVIL, EVIL, EVIL)],
        config={EVIL: EVIL},
        phases=PhaseSplit({"step": 1.0, EVIL: 1.0}, {}, 20),
    )
    html = page(evil)
    assert "<script" not in html
    assert text_of(html).count("<script>") >= 15


def test_text_that_utf8_cannot_represent_is_replaced(tmp_path):
    path = write_report(record(name="a\udcff"), tmp_path)
    assert "a?" in text_of(path.read_text(encoding="utf-8"))


def test_page_of_an_empty_record_is_complete():
    for status in ("finished", "interrupted", "failed", "incomplete"):
        assert "empty" in text_of(page(RunRecord("empty", status)))


def test_page_of_a_single_step_has_no_recommendation_and_no_nan():
    one = record(
        phases=PhaseSplit({"other": 2.0, "data": 0.0}, {"data": 1.0, "forward": 0.5}, 1),
        curves={"train/loss": curve([0.7])},
        iteration=1,
    )
    text = text_of(page(one))
    assert "too few" in text
    assert "nan" not in text.lower().replace("values that are nan", "")


def test_curve_that_contains_only_nan_has_marks_but_no_line():
    made = Curve()
    made.add(1, [math.nan])
    made.add(2, [math.inf])
    svg = line_chart("loss", [Line("loss", made)], "iteration")
    assert svg.count('class="bad"') == 2
    assert 'class="line' not in svg
    parsed(page(record(curves={"train/loss": made})))


def test_nan_interrupts_the_line():
    svg = line_chart("loss", [Line("loss", curve([1, 2, math.nan, 3, 2]))], "iteration")
    assert svg.count('class="line s0"') == 2


def test_constant_and_huge_values_have_finite_coordinates():
    for values in (
        [0.0, 0.0],
        [5.0, 5.0],
        [1e300, -1e300],
        [1e-300, 1e300],
        [1e-320, 2e-320],
        [-3.0],
        [1e308, 1.7e308],
    ):
        svg = line_chart("c", [Line("c", curve(values))], "iteration")
        assert "nan" not in svg
        assert "inf" not in svg
        assert "<svg" in svg


def test_page_with_a_hundred_thousand_points_is_small():
    long = curve([math.sin(i / 500) + 0.1 * math.sin(i) for i in range(100_000)])
    html = page(record(curves={"train/loss": long, "val/acc": long}))
    assert len(html) < 150_000


def test_lines_can_be_distinguished_without_color():
    html = line_chart("c", [Line(f"run {i}", curve([i, i + 1])) for i in range(3)], "iteration")
    style = page(record())
    for index in range(3):
        assert f'class="line s{index}"' in html
        assert f"run {index}" in html
    assert style.count("stroke-dasharray") >= 7


def test_class_table_matches_the_confusion_matrix():
    confusion = Confusion("IoUMetric", "val", 7, ["road", "sky", "car"], [[6, 2, 0], [0, 4, 0], [0, 0, 0]])
    text = text_of(page(record(confusions=[confusion])))
    assert "Classes (IoUMetric, val after iteration 7)" in text
    for row in ("road 66.7 75.0 100.0 75.0 8", "sky 33.3 66.7 66.7 100.0 4", "car 0.0 – – – 0"):
        assert row in " ".join(text.split()), row


def test_messages_show_fallbacks_and_the_number_of_omitted_messages():
    message = LogMessage(
        "2026/01/02 03:04:05", "WARNING", "The step cannot be compiled as one graph: several optimizers"
    )
    text = text_of(page(record(messages=[message], dropped_messages=1234)))
    assert "several optimizers" in text
    assert "1,234 more messages" in text


def test_accelerator_page_names_what_the_host_cannot_observe():
    text = text_of(page(record(settings={"device": "cuda"})))
    assert "asynchronously" in text
    assert "asynchronously" not in text_of(page(record()))


def test_time_of_a_single_graph_is_not_split():
    made = record(
        step="one compiled graph", phases=PhaseSplit({"step": 9.0}, {}, 20), settings={"compile": True}
    )
    text = text_of(page(made))
    assert "training step: one compiled graph" in text
    assert "is not split" in text


def test_image_of_predictions_is_inline_and_must_be_a_png(tmp_path):
    folder = tmp_path / "vis_data" / "vis_image"
    folder.mkdir(parents=True)
    (folder / "predictions_8.png").write_bytes(b"<svg onload=alert(1)>")
    assert "<img" not in page(record(), tmp_path)
    (folder / "predictions_8.png").write_bytes(b"\x89PNG\r\n\x1a\n rest")
    html = page(record(), tmp_path)
    parsed(html)
    assert '<img alt="Validation images' in html


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (8.25, "8.2 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations_are_abbreviated(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (1.0, "1"), (0.12345, "0.1235"), (1234.56, "1,235"), (2e-4, "2e-4"),
        (1.234e7, "1.234e7"), (-0.5, "-0.5"), (100.0, "100"), (1e-300, "1e-300"),
        (math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "-infinity"),
    ],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value, text):
    assert number(value) == text


def test_examples_show_label_prediction_and_probability():
    examples = [
        Example("cat", "dog", 0.987, DOT),
        Example("cat", "cat", 0.51, DOT),
        Example("a", "b", None, DOT),
    ]
    html = page(record(examples=examples))
    text = text_of(html)
    for part in ("✗ dog 99% label: cat", "✓ cat 51% label: cat", "✗ b label: a"):
        assert part in text
    assert ("alt", "wrong: predicted dog, label cat") in parsed(html).attributes
    assert html.count(DOT) == 3


def test_image_that_is_not_a_png_is_not_shown():
    for picture in ("", "AAAA", "not base64", '"onerror="alert(1)'):
        assert "<img" not in page(record(examples=[Example("a", "b", 0.5, picture)]))


def test_utilization_is_computed_for_all_devices():
    # The run trains on 797 samples in 60 s. The two devices have a combined peak of 4e9 operations per second.
    made = record(compute=Compute(6e7, 2e9, 2, "bf16", "a data sheet"))
    assert utilization(made) == pytest.approx(6e7 * 797 / 60 / 4e9)
    text = text_of(page(made))
    assert "model FLOPs utilization 19.9% of the bf16 peak" in text
    assert "A sample requires 0.06 GFLOP" in text
    assert "the peak is 2 x 0.002 TFLOP/s (bf16, a data sheet)" in text
    table = comparison_csv(compare([(Path("a"), made), (Path("b"), record())]))
    rows = csv.DictReader(table.splitlines())
    assert [row["model FLOPs utilization"] for row in rows] == [str(utilization(made)), ""]


def test_unknown_utilization_names_the_reason():
    text = text_of(page(record(compute=Compute(problem="the peak is unknown"))))
    assert "Model FLOPs utilization: unknown, because the peak is unknown." in text
    assert "FLOPs" not in text_of(page(record()))


def test_measured_options_are_the_first_recommendation():
    text = text_of(page(record(tuned=[TunedOptions(["fused"], 1.5, 1.4, 1.6, False)])))
    assert text.index("with fused, training steps run 1.50 times as fast") < text.index(
        "a factor of at most 1.50"
    )


def test_a_work_dir_means_its_newest_run_that_trained(tmp_path):
    for name in ("1_train", "2_train", "3_val"):
        curves = {"val/mIoU": curve([1.0])} if name == "3_val" else record().curves
        (tmp_path / name).mkdir()
        write_report(record(started=f"2026-01-0{name[0]} 00:00:00", curves=curves), tmp_path / name)
    assert run_folder(tmp_path).name == "2_train"
    shutil.rmtree(tmp_path / "1_train")
    shutil.rmtree(tmp_path / "2_train")
    assert run_folder(tmp_path).name == "3_val"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="requires chromium")
def test_browser_renders_the_page(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    html = write_report(record(confusions=[Confusion("m", "val", 1, ["a", "b"], [[1, 2], [3, 4]])]), run)
    assert run_folder(run) == run
    picture = tmp_path / "page.png"
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", "--window-size=1000,1500", html.as_uri(),
    ]  # fmt: skip
    # Child processes of a browser may outlive the browser, and would keep a pipe open.
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    image = pytest.importorskip("PIL.Image").open(picture)
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20
