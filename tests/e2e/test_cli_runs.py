"""Tests of `slipstream runs` and `slipstream report`."""

import json
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))

from records import curve, record, text_of

from slipstream.report import find_runs, read_run, write_report

BAD = "[red]bad[/red]"
LOG = """\
2026/01/02 03:04:05 - INFO - Environment: python 3.11.7, platform Linux, torch 2.13.0, device cpu, world_size 2
2026/01/02 03:04:06 - INFO - Epoch(train) [1][10/20]  loss: 1.0
2026/01/02 03:04:08 - WARNING - The step cannot be compiled as one graph
  because of a reason
2026/01/02 03:05:05 - INFO - Epoch(train) [1][20/20]  loss: 0.5
"""


def logged(folder, name="killed", scalars='{"step": 10, "iter": 10, "epoch": 1, "loss": 1.0, "lr": 0.1}\n'):
    """Write the log and the scalars of a killed run. The last line of the scalars is incomplete."""
    run = folder / name
    (run / "vis_data").mkdir(parents=True)
    (run / f"{name}.log").write_text(LOG, encoding="utf-8")
    (run / "vis_data" / "scalars.json").write_text(
        scalars
        + '{"step": 1, "mIoU": 33.5}\n{"step": 20, "iter": 20, "epoch": 1, "loss": null}\n{"step": 30, "it',
        encoding="utf-8",
    )
    return run


def reported(folder, name, **changes):
    run = folder / name
    run.mkdir(parents=True)
    write_report(record(name=name, **changes), run)
    return run


@pytest.fixture
def runs(tmp_path):
    """Return a folder with a finished, a failed, a killed, a damaged and an empty run."""
    folder = tmp_path / "work_dirs"
    reported(folder / "a", "good", curves={"val/mIoU": curve([40.0]), "train/loss": curve([0.5])})
    reported(
        folder / "b",
        BAD,
        status="failed",
        config={"optim_wrapper.optimizer.lr": 0.2},
        curves={"val/mIoU": curve([20.0])},
    )
    logged(folder / "c")
    damaged = reported(folder / "d", "damaged")
    (damaged / "report.json").write_text('{"format": 1', encoding="utf-8")
    (folder / "e" / "empty" / "vis_data").mkdir(parents=True)
    (folder / "not_a_run").mkdir()
    return folder


def rows(capsys, *arguments, status=0):
    assert main(["runs", *map(str, arguments)]) == status
    return capsys.readouterr().out.splitlines()


def names(lines):
    """Return the names of the runs in the printed order."""
    known = ("good", BAD, "killed", "damaged", "empty")
    return [name for line in lines for name in known if line.lstrip()[2:].startswith(name)]


def test_every_run_has_a_row_with_its_status(runs, capsys):
    lines = rows(capsys, runs)
    text = "\n".join(lines)
    for name, status in {"a/good": "finished", "b/[red]bad[/red]": "failed", "c/killed": "incomplete",
                         "d/damaged": "unreadable", "e/empty": "incomplete"}.items():  # fmt: skip
        (line,) = [line for line in lines if line.strip().startswith(f"{name} ")]
        assert status in line
    assert "not_a_run" not in text
    assert "delete" in text  # the remedy for the damaged report


def test_rows_are_sorted_and_rows_without_the_value_come_last(runs, capsys):
    assert names(rows(capsys, runs, "--sort", "mIoU"))[:3] == [BAD, "killed", "good"]
    assert names(rows(capsys, runs, "--sort", "val/mIoU-"))[:3] == ["good", "killed", BAD]


def test_rows_can_be_sorted_by_the_best_value(tmp_path, capsys):
    reported(tmp_path, "late", curves={"val/mIoU": curve([10.0, 30.0])})
    reported(tmp_path, "early", curves={"val/mIoU": curve([40.0, 20.0])})
    made = rows(capsys, tmp_path, "--sort", "mIoU.max-", "--columns", "val/mIoU.min", "--json")
    values = [(row["mIoU.max"], row["val/mIoU.min"]) for row in json.loads("\n".join(made))]
    assert values == [(40.0, 20.0), (30.0, 10.0)]


def test_rows_are_filtered_by_columns_and_settings(runs, capsys):
    assert names(rows(capsys, runs, "--filter", "status=failed")) == [BAD]
    assert names(rows(capsys, runs, "--filter", "optim_wrapper.optimizer.lr=1e-1")) == ["good"]
    both = ["--filter", "optim_wrapper.optimizer.lr=0.2", "--filter", "status=finished"]
    assert names(rows(capsys, runs, *both)) == []


def test_settings_can_be_columns(runs, capsys):
    lines = rows(capsys, runs, "--columns", "optim_wrapper.optimizer.lr", "--filter", "status=failed")
    assert any("0.2" in line for line in lines if "bad" in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "mIou"], "no run has a value for 'mIou'"),
        (["--filter", "statsu=failed"], "no run has a value for 'statsu'"),
        (["--filter", "failed"], "KEY=VALUE"),
    ],
)
def test_invalid_keys_raise_errors(runs, capsys, arguments, message):
    try:
        status = main(["runs", str(runs), *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_folder_without_runs_is_not_an_error_but_a_missing_one_is(tmp_path, capsys):
    assert rows(capsys, tmp_path) == [f"No runs found in {tmp_path}"]
    assert rows(capsys, tmp_path / "missing", status=2) == []


def test_report_of_a_killed_run_is_collected_from_its_logs(tmp_path, capsys):
    run = logged(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    made = read_run(run)
    assert (made.status, made.source, made.iteration, made.seconds) == ("incomplete", "logs", 20, 60.0)
    assert (made.curves["train/loss"].mean, made.curves["train/loss"].bad) == ([1.0, None], 1)
    assert made.curves["val/mIoU"].mean == [33.5]
    assert [message.text for message in made.messages] == [
        "The step cannot be compiled as one graph\n  because of a reason"
    ]
    assert made.environment == {
        "python": "3.11.7", "platform": "Linux", "torch": "2.13.0", "device": "cpu", "world_size": "2"
    }  # fmt: skip
    text = text_of((run / "report.html").read_text(encoding="utf-8"))
    assert "generated from the log files" in text


def test_report_of_a_run_that_continues_is_collected_again(tmp_path):
    run = logged(tmp_path)
    assert main(["report", str(run)]) == 0
    with (run / "vis_data" / "scalars.json").open("a", encoding="utf-8") as file:
        file.write('er\n{"step": 40, "iter": 40, "loss": 0.1}\n')
    assert read_run(run).iteration == 40


def test_one_run_can_be_written_to_another_file(runs, tmp_path):
    assert main(["report", str(runs / "a"), "--out", str(tmp_path / "page.html")]) == 0
    assert "good" in text_of((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_errors_for_invalid_runs_contain_a_remedy(tmp_path, capsys):
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "slipstream runs" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err
    run = reported(tmp_path, "run")
    assert main(["report", str(run), str(run)]) == 2
    assert "TensorBoard" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_newest_run_in_a_work_dir_is_the_one_that_started_last(tmp_path, capsys):
    new = reported(tmp_path, "a_new", started="2026-02-02 00:00:00")
    reported(tmp_path, "b_old", started="2026-01-01 00:00:00")  # written later
    assert main(["report", str(tmp_path)]) == 0
    assert str(new / "report.html") in capsys.readouterr().out


def test_speed_of_a_run_is_the_mean_shown_in_its_report(tmp_path):
    run = reported(tmp_path, "one")
    (row,) = find_runs(tmp_path)
    assert row.value("images_per_second") == pytest.approx(797 / 60)
    assert "13.28" in text_of((run / "report.html").read_text(encoding="utf-8"))
