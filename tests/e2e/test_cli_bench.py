"""Tests of `slipstream bench` with a small network."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.cli import bench, bench_cell
from slipstream.cli.bench_cell import Cell
from slipstream.cli.bench_report import Measurement, block_interval, write_report
from slipstream.cli.child import Child
from slipstream.cli.main import main
from slipstream.cli.step_times import StepTimer

CONFIG = """
from tiny_runs import Net, loader, samples
from test_cli_bench import NAN_AT, SEEN

class Recorded(Net):
    def forward(self, inputs, targets, mode):
        SEEN.append(inputs)
        losses = super().forward(inputs, targets, mode)
        return {"loss": losses["loss"] * float("nan")} if len(SEEN) == NAN_AT[0] else losses

model = dict(type=Recorded)
train_dataloader = loader()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""
SEEN = []
"""The inputs of all steps."""
NAN_AT = [0]
"""The number of the step whose loss is NaN, counted from 1. With 0, no loss is NaN."""
ONE = ["--mode", "eager", "--devices", "1", "--precision", "float32", "--averaging", "off"]
SHORT = ["--steps", "4", "--warmup", "3", "--out", "out"]


def cell(recipe="tiny.py", **changes):
    options = dict(
        compiled=False, processes=1, amp=False, averaging=False, synthetic=False, warmup=3, steps=4
    )
    return Cell(**{"recipe": recipe, **options, "batch_size": None, "size": None, **changes})


def measure(tmp_path, **changes):
    """Measure a combination of options in this process. Return the exit status and the path of the result."""
    (tmp_path / "cell").mkdir(exist_ok=True)
    spec, result = tmp_path / "cell/spec.json", tmp_path / "cell/result.json"
    spec.write_text(json.dumps(asdict(cell(**changes))))
    return bench_cell.main([str(spec), str(result)]), result


@pytest.fixture(autouse=True)
def in_process(tmp_path, monkeypatch, capsys):
    """Measure each combination in this process, which is faster than in a child process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "tiny.py").write_text(CONFIG)
    SEEN.clear()

    def run(argv, **_):
        status = bench_cell.main(argv[2:])
        return Child(status, capsys.readouterr().err.strip() if status else "", 1.0)

    monkeypatch.setattr(bench, "run_child", run)


def results(tmp_path):
    return json.loads((tmp_path / "out/bench.json").read_text())


def test_all_variants_are_measured_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/slipstream", "bench", "a recipe.py", "--steps", "4"])
    assert main(["bench", "tiny.py", "--mode", "eager", "--devices", "1", *SHORT]) == 0
    found = results(tmp_path)
    assert {"date", "cpu", "cores", "torch", "slipstream"} <= found.keys()
    assert found["command"] == "slipstream bench 'a recipe.py' --steps 4"
    assert [(c["cell"]["amp"], c["cell"]["averaging"]) for c in found["cells"]] == [
        (False, False), (False, True), (True, False), (True, True)
    ]  # fmt: skip
    for measured in found["cells"]:
        assert len(measured["seconds"]) == 4
        assert min(measured["seconds"]) > 0
        assert measured["samples_per_step"] == 8
        assert measured["memory"] > 2**20
    page = (tmp_path / "out/bench.md").read_text()
    assert page.count("\n| tiny.py | ") == 4
    assert "| tiny.py | eager, 1 device, AMP, SyncBN + EMA | " in page
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert "samples/s" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.py"]  # no logs


def test_default_runs_are_five_recipes_with_every_combination(monkeypatch, tmp_path):
    seen = []

    def run(argv, timeout, environ, **_):
        seen.append((json.loads(Path(argv[2]).read_text()), timeout, environ))
        return Child(1, "not run", 0.0)

    monkeypatch.setattr(bench, "run_child", run)
    monkeypatch.setattr(bench, "cores", lambda: 8)
    assert main(["bench", "--size", "64x128", "--synthetic", "--timeout", "9", *SHORT]) == 1
    assert len(seen) == 5 * 16
    assert len({spec["recipe"] for spec, _, _ in seen}) == 5
    assert all(spec["size"] == [64, 128] and spec["synthetic"] and limit == 9 for spec, limit, _ in seen)
    assert all(environ["OMP_NUM_THREADS"] == str(8 // spec["processes"]) for spec, _, environ in seen)


@pytest.mark.parametrize(
    ("kind", "count", "expected"), [("cpu", 1, [1, 2]), ("cuda", 1, [1]), ("cuda", 2, [1, 2])]
)
def test_two_devices_are_measured_only_if_the_machine_has_two(kind, count, expected, monkeypatch):
    monkeypatch.setattr("slipstream.devices.default_device", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert bench._device_counts() == expected


@pytest.mark.parametrize(
    "own", [dict(by_epoch=False, max_iters=2), dict(type="IterBasedTrainLoop", max_iters=2)]
)
def test_iteration_based_training_lasts_for_all_steps(tmp_path, own):
    (tmp_path / "tiny.py").write_text(f"{CONFIG}\ntrain_cfg = {own}\n")
    status, result = measure(tmp_path)
    assert status == 0
    assert len(json.loads(result.read_text())["seconds"]) == 4


def test_row_of_a_failed_run_contains_the_reason(tmp_path, capsys):
    assert main(["bench", "tiny.py", "missing_data.py", *ONE, *SHORT]) == 2  # a recipe that does not exist
    assert "missing_data.py" in capsys.readouterr().err
    assert main(["bench", "tiny.py", *ONE, *SHORT, "--size", "32x64"]) == 1
    (measured,) = results(tmp_path)["cells"]
    assert "tiny.py reads its images from files" in measured["error"]
    assert (
        "--size: applies only to generated images, but tiny.py reads"
        in (tmp_path / "out/bench.md").read_text()
    )
    assert not (tmp_path / "out/bench.png").exists()


def test_ctrl_c_keeps_the_completed_runs(tmp_path, monkeypatch, capsys):
    run, calls = bench.run_child, []

    def interrupted(argv, **options):
        calls.append(argv)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(argv, **options)

    monkeypatch.setattr(bench, "run_child", interrupted)
    assert main(["bench", "tiny.py", "--mode", "eager", "--devices", "1", *SHORT]) == 130
    assert len(results(tmp_path)["cells"]) == 1
    assert (tmp_path / "out/bench.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--warmup", "2"],
            "--warmup: must be at least 3, because the compiled step is captured and verified during",
        ),
        (["--out", "tiny.py/out"], "--out: cannot write to the folder"),
        (["street_scenes_regseg"], "did you mean 'street_scenes_regseg48'"),
    ],
)
def test_invalid_options_raise_errors_before_the_first_run(words, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run_child", None)
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--devices", "3"], ["--timeout", "-1"], ["--mode", "fast"]]
)
def test_parser_rejects_invalid_values(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    assert stopped.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_synthetic_run_repeats_one_batch(tmp_path):
    status, result = measure(tmp_path, synthetic=True, batch_size=4)
    assert status == 0
    assert json.loads(result.read_text())["samples_per_step"] == 4
    assert len(SEEN) == 7
    assert all(torch.equal(inputs, SEEN[0]) for inputs in SEEN)
    SEEN.clear()
    assert measure(tmp_path)[0] == 0
    assert not torch.equal(SEEN[0], SEEN[1])


@pytest.mark.parametrize("batch_size", [30, 100])
def test_synthetic_run_counts_the_samples_of_the_repeated_batch(tmp_path, batch_size):
    status, result = measure(tmp_path, synthetic=True, batch_size=batch_size)
    assert status == 0
    assert {len(inputs) for inputs in SEEN} == {min(batch_size, 40)}
    assert json.loads(result.read_text())["samples_per_step"] == min(batch_size, 40)


def test_samples_of_a_smaller_last_batch_are_counted(tmp_path):
    status, result = measure(tmp_path, batch_size=7)
    assert status == 0
    timed = [len(inputs) for inputs in SEEN[3:7]]
    assert min(timed) < 7
    assert json.loads(result.read_text())["samples_per_step"] == sum(timed) / 4


def test_run_whose_options_had_no_effect_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_cell, "_speed", lambda _: {})
    status, result = measure(tmp_path, compiled=True)
    assert (status, result.exists()) == (1, False)
    assert "the timed steps did not run as one graph" in capsys.readouterr().err


def test_run_with_a_nonfinite_loss_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("test_cli_bench.NAN_AT", [7])
    status, result = measure(tmp_path)
    assert (status, result.exists()) == (1, False)
    assert "the loss of a timed step is not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("loss_a", "b.loss"), ""),
        (("loss_a", "last_loss"), "the loss of a timed step is not finite"),
        (("a", "b"), "no entry with 'loss'"),
    ],
)
def test_losses_of_a_custom_training_step_are_summed(tmp_path, capsys, monkeypatch, names, error):
    monkeypatch.setattr("test_cli_bench.NAN_AT", [7])
    step = f"""
import torch

class Custom(Recorded):
    def train_step(self, data, optim_wrapper):
        inputs, targets = data
        loss = super().forward(inputs, targets, "loss")["loss"]
        optim_wrapper.update_params(loss)
        return {{name: loss if name == "last_loss" else torch.ones(()) for name in {names}}}

model = dict(type=Custom)
"""
    (tmp_path / "tiny.py").write_text(CONFIG + step)
    status, result = measure(tmp_path)
    assert (status, result.exists()) == (int(bool(error)), not error)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(monkeypatch, platform, unit):
    monkeypatch.setattr("slipstream.cli.step_times.sys.platform", platform)
    monkeypatch.setattr(
        "slipstream.cli.step_times.resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3)
    )
    assert StepTimer(1, 1, torch.device("cpu")).memory() == 3 * unit


def test_run_sets_its_options_and_removes_the_same_options_from_the_recipe():
    cfg = bench_cell._config(
        cell("cityscapes_regseg48", compiled=True, processes=2, amp=True, averaging=True),
        "w",
    )
    assert cfg.speed.to_dict() == {
        "precision": "bf16",
        "compile": {"scope": "step"},
        "parallel": "ddp",
        "ema": {"type": "constant", "decay": 0.99},
        "sync_bn": True,
    }
    plain = bench_cell._config(cell("street_scenes_pp_lite_t", size=(64, 128)), "w")
    assert list(plain.train_dataloader.dataset.size) == [64, 128]
    assert plain.default_hooks.to_dict() == {"checkpoint": None, "report": None, "preemption": None}
    assert plain.speed.to_dict() == {"precision": "fp32"}
    assert not plain.custom_hooks


def test_run_keeps_the_recipes_other_speed_options(tmp_path):
    own = 'speed = dict(accumulate=2, precision="fp16", compile=True, cuda_graph=True, ema=True)'
    params = "training_params = dict(speed=dict(fused=True, sync_bn=True), ema=True)"
    (tmp_path / "tiny.py").write_text(f"{CONFIG}\n{own}\n{params}\n")
    eager = bench_cell._config(cell(), "w")
    assert eager.speed.to_dict() == {"accumulate": 2, "precision": "fp32"}
    assert eager.training_params.to_dict() == {"speed": {"fused": True}}
    assert bench_cell._config(cell(compiled=True), "w").speed.cuda_graph is True
    (tmp_path / "tiny.py").write_text(f"{CONFIG}\nspeed = 'auto'\n")
    assert bench_cell._config(cell(), "w").speed.to_dict() == {"auto": True, "precision": "fp32"}


@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 1, 6), (8, 1.5, 8), (12, 1.5, 11.5), (20, 2.5, 19), (60, 5.5, 55.5)]
)
def test_interval_is_the_range_of_the_means_of_six_blocks(count, low, high):
    assert block_interval([*range(count, 0, -1)]) == (low, high)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_fewer_steps_than_blocks_have_no_interval(count):
    assert block_interval([1.0] * count) is None
    assert " to " not in Measurement(cell(), [1.0] * (count or 1), samples_per_step=4).summary()


def test_step_time_includes_updates_and_waits_of_individual_steps():
    steps = [0.1, 0.1, 0.1, 0.5] * 6
    measured = Measurement(cell(), steps, samples_per_step=4)
    assert measured.summary() == "200.0 (200.0 to 200.0) ms per step, 20.0 samples/s"
    assert block_interval(steps) == pytest.approx((0.2, 0.2))


def test_table_and_picture_allow_rows_without_an_interval(tmp_path):
    rows = [
        Measurement(cell(), [0.1, 0.3], samples_per_step=4),
        Measurement(cell(amp=True), [9.0, *[0.1] * 19], 4),
    ]
    files = write_report(tmp_path, dict(cpu="c", device="d", torch="t", date="now"), rows, plot=True)
    assert len(files) == 3
    page = files[1].read_text()
    assert "| tiny.py | eager, 1 device, float32 | 200.0 | 20.0 | 1.00 | 0 |" in page
    assert "| tiny.py | eager, 1 device, AMP | 545.0 (100.0 to 3066.7) | 7.3 | 0.37 | 0 |" in page


@pytest.mark.slow
def test_two_processes_use_data_parallel_training(tmp_path, slipstream):
    small = [
        "--size",
        "32x64",
        "--batch-size",
        "2",
        "--synthetic",
        "--averaging",
        "on",
        "--precision",
        "float32",
    ]
    slipstream("bench", "street_scenes_regseg48", "--mode", "eager", "--devices", "2", *small, *SHORT)
    (measured,) = results(tmp_path)["cells"]
    assert measured["samples_per_step"] == 4
