"""Tests of the options and errors of `slipstream submit --to ray`. tests/distributed uses a real Ray cluster."""

import sys

import pytest

from ports import free_port
from slipstream.cli.main import main

RECIPE = "street_scenes_pp_lite_t"
SUBMIT = ["submit", RECIPE, "--to", "ray"]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--mem", "64Gi"],
            "`--mem` only applies to `--to slurm` and `--to kubernetes`; remove it to submit to ray",
        ),
        (["--image", "x"], "`--image` only applies to `--to kubernetes`"),
        (["--dry-run"], "`--dry-run` only applies to `--to slurm`"),
        (["--env", "A"], "--env: 'A'"),
        (["--address", "ray://host:10001"], "`--address`: 'ray://host:10001' is not HOST:PORT"),
        (["--address", "host"], "`--address`: 'host' is not HOST:PORT"),
        (["train_cfg.max_epoch=3"], "did you mean 'train_cfg.max_epochs'"),
    ],
)
def test_invalid_argument_raises_an_error(slipstream, tmp_path, arguments, expected):
    done = slipstream(*SUBMIT, *arguments, status=2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--address", "host:6379"], "`--address` only applies to `--to ray`"),
        (["--env", "A=b"], "`--env` only applies to `--to kubernetes` and `--to ray`"),
    ],
)
def test_ray_options_are_rejected_with_slurm(slipstream, arguments, expected):
    assert expected in slipstream("submit", RECIPE, "--dry-run", *arguments, status=2).stderr


def test_address_of_ray_jobs_in_the_environment_raises_an_error(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert main(SUBMIT) == 2
    assert "`RAY_ADDRESS`: 'http://127.0.0.1:8265' is not HOST:PORT" in capsys.readouterr().err


def test_missing_ray_is_reported_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(SUBMIT) == 1
    expected = "slipstream: error: ray is not installed; run: pip install 'slipstream[ray]'\n"
    assert capsys.readouterr().err == expected


def test_missing_cluster_is_reported(monkeypatch, tmp_path, capsys):
    pytest.importorskip("ray", reason="requires Ray: pip install 'slipstream[ray]'")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    for option, where in ((["--address", address], f"at {address}"), ([], "on this machine")):
        assert main([*SUBMIT, *option]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"cannot connect to a Ray cluster {where} (" in line
