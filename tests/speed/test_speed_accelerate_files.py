"""`step.save`, `step.load` and `step.summary` of steps that `accelerate` returns."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from slipstream import accelerate
from slipstream.errors import CheckpointError

COMPILED = dict(compile=dict(backend="eager"))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def loader():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=8, shuffle=True)


def parts(speed, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, accelerate(model, optimizer, F.cross_entropy, speed), CosineAnnealingLR(optimizer, 5)


def epochs(step, schedule, numbers, path=None):
    """Train for these epochs and save after each of them."""
    for epoch in numbers:
        for batch in loader():
            log = step(batch)
        schedule.step()
        if path is not None:
            step.save(path / f"{epoch}.pth", epoch=epoch, schedule=schedule.state_dict())
    return log["loss"]


@pytest.mark.parametrize("options", [{}, COMPILED, dict(accumulate=3), dict(precision="fp16")], ids=str)
def test_run_continues_exactly_from_a_file(tmp_path, options):
    options = dict(options, ema=dict(type="threshold"))
    model, step, schedule = parts(options)
    loss = epochs(step, schedule, range(5), tmp_path)

    other, resumed, schedule = parts(options, seed=1)
    saved = resumed.load(tmp_path / "1.pth")
    assert saved["epoch"] == 1
    schedule.load_state_dict(saved["schedule"])
    again = epochs(resumed, schedule, range(saved["epoch"] + 1, 5))
    # With a graph, the eager step trains the first two batches of a run, and its rounding is different.
    exact = dict(rtol=1e-4, atol=1e-5) if options.get("compile") else dict(rtol=0, atol=0)
    torch.testing.assert_close(again, loss, **exact)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **exact)
    torch.testing.assert_close(dict(resumed.average.state_dict()), dict(step.average.state_dict()), **exact)


def test_file_contains_the_weights_of_the_model(tmp_path):
    model, step, schedule = parts({})
    epochs(step, schedule, [0], tmp_path)
    content = torch.load(tmp_path / "0.pth", weights_only=True)
    torch.testing.assert_close(content["state_dict"], dict(model.state_dict()), rtol=0, atol=0)


def test_file_of_another_model_is_rejected_and_nothing_changes(tmp_path):
    _, step, schedule = parts({})
    epochs(step, schedule, [0], tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    other = accelerate(model, torch.optim.AdamW(model.parameters()), F.cross_entropy)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for name, message in [("0.pth", "0.pth: "), ("1.pth", "does not exist; did you mean '0.pth'")]:
        with pytest.raises(CheckpointError, match=message):
            other.load(tmp_path / name)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="'step' is missing"):
        other.load(tmp_path / "weights.pth")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert other.steps == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_values_that_cannot_be_loaded_are_rejected(tmp_path):
    _, step, schedule = parts({})
    with pytest.raises(
        CheckpointError, match=r"values\.schedule is not saved: a CosineAnnealingLR is neither"
    ):
        step.save(tmp_path / "a.pth", schedule=schedule)
    assert not (tmp_path / "a.pth").exists()


# ---- summary ----------------------------------------------------------------------------------------------


def test_summary_reports_the_graph_and_the_options():
    _, step, _ = parts(dict(COMPILED, accumulate=2, ema=dict(type="threshold"), precision="bf16"))
    assert "step: will be compiled as one graph at the second batch; 0 batches trained" in step.summary()
    for batch in list(loader())[:3]:
        step(batch)
    text = step.summary()
    assert "step: compiled as one graph; 3 batches trained" in text
    assert "precision (speed.precision)" in text
    assert "accumulation: 2 batches per update; the current window is unfinished" in text
    assert "average: 1 updates" in text
    assert "warning" not in text


def test_summary_reports_why_the_step_is_not_compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets) * (2.0 if outputs.sum().item() > 0 else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accelerate(model, optimizer, loss, dict(compile=dict(backend="eager")))
    for batch in loader():
        step(batch)
    text = step.summary()
    assert "step: eager, with a compiled model; 4 batches trained" in text
    assert "warning: The step cannot be compiled as one graph" in text
    assert "outputs.sum().item() > 0" in text


def test_summary_of_an_eager_step_lists_the_options_that_auto_selects():
    model = nn.Linear(4, 4)
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    step((torch.ones(2, 4), torch.tensor([0, 1])))
    text = step.summary()
    assert "step: eager; 1 batch trained" in text
    assert "fused (auto: " in text
    assert "compile is off: compilation can take minutes" in text
