"""mmpretrain, mmsegmentation and mmdetection train, validate, save and resume with stock configurations.

`make openmmlab` installs the libraries in a separate environment and runs these tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from library_cases import CASES, folder, missing

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def run(case, work, *options, speed=()):
    # The shims replace packages that the libraries import, such as torchvision.
    path = os.pathsep.join([str(SRC), str(HERE / "shims")])
    tools = folder(case.library) / ".mim/tools/train.py"
    start = [sys.executable, "-m", "slipstream.openmmlab", *speed, tools, work / "config.py"]
    done = subprocess.run(
        [str(part) for part in [*start, "--work-dir", work / "work", *options]],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=540,
        cwd=work,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def prepared(name, work):
    """Write the configuration and the data of a case. Return the case and the data folder."""
    case = CASES[name]
    if (reason := missing(case)) is not None:
        pytest.skip(reason)
    (work / "config.py").write_text(case.text())
    return case, case.write(work / "data")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_stock_configuration_trains_validates_and_resumes(name, tmp_path):
    case, data = prepared(name, tmp_path)
    first, last = (2, 4) if case.iterations else (1, 2)
    log = run(case, tmp_path, "--cfg-options", *case.options(data, first))
    assert "`import mmengine` now imports Slipstream" in log
    assert case.metric in log
    assert "Saved checkpoint" in log
    log = run(case, tmp_path, "--resume", "--cfg-options", *case.options(data, last))
    assert "Resumed after" in log
    assert (tmp_path / "work" / f"{'iter' if case.iterations else 'epoch'}_{last}.pth").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "shapes"), [("mmdet", [[64, 96, 3], [32, 96, 3]]), ("mmseg", [[64, 96]])]
)
def test_the_inferencer_of_a_library_predicts_for_arrays(library, shapes, tmp_path):
    case = next(case for case in CASES.values() if case.library == library)
    if (reason := missing(case)) is not None:
        pytest.skip(reason)
    path = os.pathsep.join([str(SRC), str(HERE / "shims")])
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.openmmlab", str(HERE / "scripts/infer_stock.py"), library],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    assert result["shapes"] == shapes
    assert all(result["found"])
    assert result["params"]
    assert result["flops"] > 10**8


SPEED = ("--speed", "precision=bf16", "ema=True", "compile.backend=aot_eager")


@pytest.mark.slow
def test_a_step_with_data_samples_is_a_single_graph_with_every_option(tmp_path):
    case, data = prepared("PSPNet", tmp_path)
    options = [*case.options(data, 4), "train_cfg.val_interval=100"]
    log = run(case, tmp_path, "--cfg-options", *options, speed=[*SPEED, "compile.scope=step"])
    assert "cannot be compiled" not in log
    # One graph for training, and one for the validation at the end. Randomly flipped labels cause no recompile.
    assert "torch.compile: 2 graphs, no graph breaks, no recompiles" in log
    assert (tmp_path / "work/iter_4.pth").is_file()


@pytest.mark.slow
def test_unsupported_line_is_reported(tmp_path):
    case, data = prepared("RetinaNet", tmp_path)
    log = run(case, tmp_path, "--cfg-options", *case.options(data, 1), speed=[*SPEED])
    assert "Data-dependent branching" in log
    assert "anchor_head.py:243: `if not inside_flags.any():`" in log
    assert (tmp_path / "work/epoch_1.pth").is_file()
