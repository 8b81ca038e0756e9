"""Tests of short runs in two processes, with half of the batch each. The model is a plain module with `loss_fn`.

The expected weights and losses come from a loop written by hand in float64, in one process with the whole batch.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_processes import run_in_two

from slipstream.errors import ConfigError
from slipstream.runner import Runner

pytestmark = pytest.mark.slow  # starts processes and takes more than five seconds

COMPILED = dict(compile=dict(backend="eager", scope="step"))
SPEEDS = {
    "eager": {},
    "compiled": COMPILED,
    "accumulated": dict(accumulate=2),
    "prefetch": dict(COMPILED, prefetch=2),
}
RUNS = {
    "limited": dict(limit_train_batches=2, limit_val_batches=2),
    "overfit": dict(overfit_batches=2),
    "fast": dict(fast_dev_run=2),
    "whole": {},
}
STEPS = {"limited": [0, 1] * 2, "overfit": [0, 1] * 2, "fast": [0, 1], "whole": [*range(4)] * 2}
VALIDATED = {"limited": 16, "overfit": 32, "fast": 16, "whole": 32}
"""The number of samples in the last validation. A batch contains four samples in each process."""


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def loader():
    sampler = dict(type="DefaultSampler", shuffle=False)
    return dict(dataset=data(), batch_size=4, sampler=sampler, collate_fn=dict(type="default_collate"))


def runner(folder, **changes):
    options = dict(
        loss_fn=F.cross_entropy,
        train_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        val_dataloader=loader(),
        val_cfg={},
        val_evaluator="loss",
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=None),
        launcher="pytorch",
        log_level="ERROR",
    )
    return Runner(net(), folder, **{**options, **changes})


def short_runs(folder):
    """Return the final weights and the loss of the last validation of each run."""
    answers = {}
    for speed, plan in SPEEDS.items():
        for name, changes in RUNS.items():
            trained = runner(folder / f"{speed}_{name}", speed=plan, **changes)
            trained.train()
            model = getattr(trained.model, "module", trained.model)
            loss = trained.message_hub.get_scalar("val/loss").current()
            answers[speed, name] = {key: value.clone() for key, value in model.state_dict().items()}, loss
    return answers


def existing_loaders(folder):
    """Return the final weights with torch's DataLoader, and the error for a list of batches."""
    changes = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    trained = runner(folder / "torch", train_dataloader=DataLoader(data(), batch_size=4), **changes)
    trained.train()
    weights = getattr(trained.model, "module", trained.model).state_dict()
    inputs, targets = data().tensors
    try:
        runner(folder / "list", train_dataloader=[(inputs[:4], targets[:4])], **changes).train()
    except ConfigError as error:
        return weights, str(error)
    return weights, "no error"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_in_two([short_runs, existing_loaders], tmp_path_factory.mktemp("short"), timeout=200)


def by_hand(steps, accumulated=1):
    inputs, targets = data().tensors
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(steps), accumulated):
        window = steps[start : start + accumulated]
        for step in window:
            batch = slice(8 * step, 8 * step + 8)
            (F.cross_entropy(model(inputs[batch]), targets[batch]) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("speed", SPEEDS)
def test_short_run_of_two_processes_equals_one_process_with_the_whole_batch(answers, speed, name):
    expected = by_hand(STEPS[name], SPEEDS[speed].get("accumulate", 1))
    inputs, targets = (tensor[: VALIDATED[name]] for tensor in data().tensors)
    for answer in answers["short_runs"]:
        assert isinstance(answer, dict), answer
        weights, loss = answer[speed, name]
        torch.testing.assert_close(weights, expected.state_dict(), rtol=1e-9, atol=1e-12)
        assert loss == pytest.approx(F.cross_entropy(expected(inputs), targets).item(), rel=1e-9)


def test_existing_loader_is_sharded_and_a_list_is_rejected(answers):
    for answer in answers["existing_loaders"]:
        assert isinstance(answer, tuple), answer
        torch.testing.assert_close(answer[0], by_hand(STEPS["whole"]).state_dict(), rtol=1e-9, atol=1e-12)
        assert "same batches" in answer[1]
