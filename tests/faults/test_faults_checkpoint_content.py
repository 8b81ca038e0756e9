"""Resume from checkpoints whose contents were changed."""

import copy
import math
import random
from contextlib import suppress

import fuzz_checkpoint as fuzz
import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.runner import Runner
from tiny_runs import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("content")


@pytest.fixture(scope="module")
def valid(folder):
    return fuzz.valid_checkpoint(folder)


def refused(content, folder, *path):
    problem, message = fuzz.outcome_of(content, path, folder)
    assert problem is None
    assert message is not None, "the checkpoint was accepted"
    return message


def put(content, value, *path):
    content = copy.deepcopy(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return content


def without(content, *path):
    content = copy.deepcopy(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return content


def test_unchanged_checkpoint_resumes_exactly(valid, tmp_path):
    assert {"ema_state_dict", "rank_gradients", "param_schedulers", "message_hub"} <= valid.keys()
    assert valid["optimizer"]["loss_scaler"]["scale"] > 0
    assert fuzz.outcome_of(valid, [], tmp_path) == (None, None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("meta",), None),
        (("meta", "epoch"), -7),
        (("meta", "epoch"), True),
        (("meta", "iter"), "7"),
        (("meta", "iter"), 2**70),
        (("meta", "inner_samples"), 10**6),
        (("meta", "samples_per_step"), 0),
        (("meta", "validated"), "no"),
        (("meta", "seed"), 1.5),
        (("meta", "random_state"), {"python": 1}),
        (("meta", "random_state", 0, "numpy", 2), 10**6),
        (("meta", "random_state", 0, "torch"), torch.zeros(3, dtype=torch.uint8)),
        (("meta", "sampler_generators"), {"Weighted.rng": 1}),
        (("meta", "sampler_generators", 0), [1]),
        (("state_dict",), {}),
        (("state_dict",), [1]),
        (("state_dict", "first.weight"), torch.zeros(8, 5)),
        (("ema_state_dict",), []),
        (("ema_state_dict", "steps"), torch.tensor(-1)),
        (("ema_state_dict", "steps"), 1.5),
        (("ema_state_dict", "steps"), torch.tensor(3).to_sparse()),
        (("ema_state_dict", 7), torch.zeros(1)),
        (("ema_state_dict", "module.first.weight"), torch.zeros(8, 4, dtype=torch.int64)),
        (("ema_state_dict", "module.first.weight"), torch.zeros(8, 4).to_sparse()),
        (("optimizer",), [1]),
        (("optimizer", "state"), []),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(4, 8)),
        (("optimizer", "state", 0, "step"), math.nan),
        (("optimizer", "state", 0, "step"), torch.tensor(3.0).to_sparse()),
        (("optimizer", "state", 77), {"step": 1}),
        (("optimizer", "param_groups"), []),
        (("optimizer", "param_groups", 0, "lr"), -0.1),
        (("optimizer", "param_groups", 0, "lr"), "fast"),
        (("optimizer", "param_groups", 0, "betas"), 0.9),
        (("optimizer", "param_groups", 0, "betas"), (0.9, 7.0)),
        (("optimizer", "param_groups", 0, "params"), ["a"]),
        (("optimizer", "loss_scaler"), torch.ones(4)),
        (("optimizer", "loss_scaler", "scale"), 0.0),
        (("optimizer", "loss_scaler", "_growth_tracker"), 2**40),
        (("optimizer", "param_groups", 0, "amsgrad"), None),
        (("optimizer", "loss_scaler", "growth_interval"), "x"),
        (("rank_gradients", 0, "first.weight"), torch.zeros(8, 4, dtype=torch.bool)),
        (("param_schedulers",), {}),
        (("param_schedulers", 0), 3),
        (("param_schedulers", 0, "_global_step"), 1.5),
        (("param_schedulers", 0, "base_values"), [0.1]),
        (("param_schedulers", 0, "_last_value"), None),
        (("message_hub",), 5),
        (("message_hub",), torch.ones(4)),
        (("message_hub",), {"log_scalars": {}}),
        (("message_hub", "log_scalars", "train/loss", 3), 3),
        (("message_hub", "log_scalars", "train/loss"), {}),
        (("message_hub", "log_scalars", "train/loss", "log_history"), "abc"),
        (("message_hub", "runtime_info", "best_score/acc"), "high"),
        (("message_hub", "runtime_info", "best_ckpt/acc"), 3),
        (("message_hub", "runtime_info", "early_stopping/acc"), None),
        (("message_hub", "runtime_info", "kept_ckpts/iter_{}.pth"), 1),
        (("gradients",), [1]),
        (("rank_gradients",), {"first.weight": 1}),
        (("rank_gradients", 0, "nowhere"), torch.zeros(1)),
        (("rank_gradients", 0, "first.weight"), torch.zeros(3)),
        (("comm_hook",), [1]),
    ],
    ids=str,
)
def test_error_names_an_invalid_entry_and_nothing_changes(valid, tmp_path, path, value):
    message = refused(put(valid, value, *path), tmp_path, *path)
    assert "changed.pth" in message or "in the checkpoint" in message


@pytest.mark.parametrize(
    "path",
    [
        ("meta", "epoch"),
        ("meta", "iter"),
        ("optimizer", "state"),
        ("optimizer", "param_groups"),
        ("optimizer", "param_groups", 0, "lr"),
        ("optimizer", "state", 0, "exp_avg"),
        ("optimizer", "loss_scaler", "scale"),
        ("param_schedulers", 1, "base_values"),
        ("message_hub", "log_scalars", "train/loss", "count_history"),
        ("ema_state_dict", "steps"),
        ("ema_state_dict", "module.norm.bias"),
    ],
    ids=str,
)
def test_error_names_a_missing_entry_and_nothing_changes(valid, tmp_path, path):
    refused(without(valid, *path), tmp_path, *path)


@pytest.mark.parametrize(
    ("path", "warning"),
    [
        (("ema_state_dict",), "the checkpoint has no 'ema_state_dict'"),
        (("message_hub",), "has no 'message_hub'"),
        (("meta", "random_state"), "has no 'meta.random_state'"),
        (("meta", "inner_samples"), "has no 'meta.inner_samples'"),
        (("optimizer", "loss_scaler"), "has no 'optimizer.loss_scaler'"),
        (("optimizer", "state", 1), "'optimizer.state' has no entries for the parameters [1]"),
        (("rank_gradients",), "has no 'gradients', but iteration 7 is in the middle of an accumulation"),
    ],
    ids=str,
)
def test_missing_entry_that_an_exact_resume_requires_is_reported(valid, tmp_path, capsys, path, warning):
    content = without(valid, *path)
    if path == ("rank_gradients",):
        del content["gradients"]
    torch.save(content, tmp_path / "changed.pth")
    watch = fuzz.Watch()
    with suppress(fuzz.DoneError):
        changes = dict(resume=str(tmp_path / "changed.pth"), log_level="WARNING")
        Runner(**fuzz.arguments(tmp_path / "run", watch, **changes)).train()
    assert watch.steps == 2
    assert warning in " ".join(capsys.readouterr().out.split())


def test_invalid_meta_in_the_newest_checkpoint_falls_back_to_the_previous_checkpoint(tmp_path, capsys):
    run(tmp_path)
    newest = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    torch.save(put(newest, -7, "meta", "epoch"), tmp_path / "epoch_2.pth")
    other = run(tmp_path, resume=True, log_level="WARNING")
    assert other.iter == 10
    text = " ".join(capsys.readouterr().out.split())
    assert "'meta.epoch' must be an integer from 0 to 2**40, not -7" in text


@pytest.mark.parametrize("value", [[1], {3: torch.zeros(1)}, None, torch.zeros(2)], ids=str)
def test_load_from_names_state_dict(tmp_path, value):
    torch.save({"state_dict": value}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="state_dict"):
        run(tmp_path, load_from=tmp_path / "other.pth")


def test_load_from_reads_only_weights(tmp_path):
    weights = run(tmp_path / "a").model.state_dict()
    torch.save(
        {"state_dict": weights, "meta": 3, "optimizer": "x", "ema_state_dict": [1]}, tmp_path / "b.pth"
    )
    still = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)))
    loaded = run(tmp_path / "b", load_from=tmp_path / "b.pth", **still)
    assert all(torch.equal(value, loaded.model.state_dict()[name]) for name, value in weights.items())


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_changes_raise_errors_that_name_them_or_resume_exactly(valid, tmp_path, first):
    problems = []
    for seed in range(first, first + (40 if first == 0 else 150)):
        content, path, change = fuzz.mutated(valid, random.Random(seed))
        problem, _ = fuzz.outcome_of(content, path, tmp_path)
        if problem is not None:
            problems.append(f"seed {seed}: {path} {change}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "content", [{}, {"checkpoint": 3, "index": {}}, {"checkpoint": {}, "index": {"a": 1}}]
)
def test_sharded_checkpoint_with_invalid_content_is_rejected(tmp_path, content):
    folder = tmp_path / "epoch_1.sharded"
    folder.mkdir()
    torch.save(content, folder / "plain.pth")
    with pytest.raises(CheckpointError, match="incomplete or damaged"):
        run(tmp_path, resume=str(folder))
