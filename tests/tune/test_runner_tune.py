"""Test that `tune(runner)` measures a Runner's configuration and leaves the Runner unchanged."""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tiny_runs
from slipstream.errors import ConfigError
from slipstream.runner import Runner
from slipstream.tune import TuneResult, tune


def state(runner):
    optim = runner.optim_wrapper
    return copy.deepcopy(
        [
            runner.model.state_dict(),
            {} if optim is None else optim.state_dict(),
            [runner.model.training, runner.iter, runner.epoch, runner.is_training],
            runner._context._random_state,
            [torch.get_rng_state(), np.random.get_state(), random.getstate()],
        ]
    )


def equal(before, after):
    if isinstance(before, torch.Tensor | np.ndarray):
        return bool((before == after).all())
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(equal(before[key], after[key]) for key in before)
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(map(equal, before, after))
    return before == after


def objects(folder):
    """Return a Runner built from model, DataLoader and optimizer instances instead of config dicts."""
    model = tiny_runs.Net(dropout=0.1, norm=True)
    loader = DataLoader(
        TensorDataset(*tiny_runs.samples()), batch_size=8, num_workers=1, persistent_workers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    changes = dict(model=model, train_dataloader=loader, optim_wrapper=dict(optimizer=optimizer))
    return Runner(**tiny_runs.training(folder, **changes))


def configuration(folder):
    changes = dict(model=dict(type=tiny_runs.Net, dropout=0.1, norm=True), speed={"accumulate": 2})
    return Runner(**tiny_runs.training(folder, **changes, **tiny_runs.validation()))


def check_that_nothing_changes(tmp_path, make, trained):
    runner = make(tmp_path)
    if trained:
        runner.train()
    before, files, rows = state(runner), sorted(tmp_path.rglob("*")), []
    result = tune(runner, budget=120, options=["fused"], report=rows.append)
    assert equal(before, state(runner))
    assert sorted(tmp_path.rglob("*")) == files
    assert isinstance(result, TuneResult)
    assert result.rows == rows
    assert rows[0].status in ("adopted", "slower", "no gain", "inconclusive")
    assert result.name == "Net"
    assert result.speed.get("accumulate") == (2 if make is configuration else None)
    assert result.outcome.steps_per_epoch == 5


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_tuning_does_not_change_a_configured_runner_or_the_random_states(tmp_path, short_rounds, trained):
    check_that_nothing_changes(tmp_path, configuration, trained)


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_tuning_does_not_change_a_runner_from_objects_or_the_random_states(tmp_path, trained):
    # Runs in a new process, because a worker of a forked trial crashed in a process that had run thousands of tests.
    script = f"""
from pathlib import Path
import pytest, test_runner_tune
from slipstream.tune import search
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(search, "_MAX_ROUND_SECONDS", 0.02)
    patch.setattr(search, "_ROUNDS_FRACTION", 0.0)
    test_runner_tune.check_that_nothing_changes(Path({str(tmp_path)!r}), test_runner_tune.objects, {trained})
"""
    here = Path(__file__).parent
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_runner_trains_identically_after_tuning(tmp_path, short_rounds):
    weights = []
    for tuned in (False, True):
        runner = configuration(tmp_path / str(tuned))
        if tuned:
            tune(runner, budget=120, options=["fused"])
        weights.append(runner.train().state_dict())
    assert equal(*weights)


def test_a_runner_that_does_not_train_is_rejected(tmp_path):
    runner = Runner(tiny_runs.Net(), str(tmp_path), log_level="ERROR")
    with pytest.raises(
        ConfigError, match="train_dataloader: is required, because training steps are measured"
    ):
        tune(runner)
