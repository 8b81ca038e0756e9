"""Tests of `step.save`, `step.load` and `step.summary` of the steps that `accelerate` returns."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from slipstream import accelerate

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
    """Train for the given epochs, save the state after each epoch if `path` is set, and return the last loss."""
    for epoch in numbers:
        for batch in loader():
            log = step(batch)
        schedule.step()
        if path is not None:
            step.save(path / f"{epoch}.pth", epoch=epoch, schedule=schedule.state_dict())
    return log["loss"]


@pytest.mark.parametrize("options", [{}, COMPILED, dict(accumulate=3), dict(precision="fp16")], ids=str)
def test_resumed_run_matches_an_uninterrupted_run(tmp_path, options):
    options = dict(options, ema=dict(type="threshold"))
    model, step, schedule = parts(options)
    loss = epochs(step, schedule, range(5), tmp_path)

    other, resumed, schedule = parts(options, seed=1)
    saved = resumed.load(tmp_path / "1.pth")
    assert saved["epoch"] == 1
    schedule.load_state_dict(saved["schedule"])
    again = epochs(resumed, schedule, range(saved["epoch"] + 1, 5))
    # With a graph, the first two batches of a run still use the eager step, which rounds differently.
    exact = dict(rtol=1e-4, atol=1e-5) if options.get("compile") else dict(rtol=0, atol=0)
    torch.testing.assert_close(again, loss, **exact)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **exact)
    torch.testing.assert_close(dict(resumed.average.state_dict()), dict(step.average.state_dict()), **exact)


def test_save_and_load_within_averaged_use_the_training_weights(tmp_path):
    model, step, schedule = parts(dict(ema=dict(type="threshold")))
    epochs(step, schedule, range(2))
    step.save(tmp_path / "outside.pth")
    with step.averaged():
        step.save(tmp_path / "inside.pth")
    outside, inside = (
        torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in ("outside", "inside")
    )
    for key in ("state_dict", "step"):
        torch.testing.assert_close(inside[key], outside[key], rtol=0, atol=0)

    expected, average = copy.deepcopy(model.state_dict()), copy.deepcopy(step.average.state_dict())
    epochs(step, schedule, [2])
    with step.averaged():
        step.load(tmp_path / "inside.pth")
        torch.testing.assert_close(model[0].weight, average["module.0.weight"], rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    torch.testing.assert_close(step.average.state_dict(), average, rtol=0, atol=0)


class Scaled(nn.Module):
    """A loss with a parameter, and a buffer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, outputs, targets):
        self.calls.add_(1)
        return F.cross_entropy(outputs * self.scale, targets)


def with_others(speed):
    """Return a head and a loss outside the model, and a step whose optimizer also contains their parameters."""
    body, head, loss = nn.Linear(4, 8), nn.Linear(8, 4), Scaled()

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, inputs):
            return head(self.body(inputs))

    model = Body()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters(), loss.scale], lr=0.1)
    return (head, loss), accelerate(model, optimizer, loss, speed)


@pytest.mark.parametrize("options", [{}, COMPILED], ids=str)
def test_parameters_outside_the_model_and_the_state_of_the_loss_are_restored(tmp_path, options):
    batches = [*loader(), *loader()]
    torch.manual_seed(0)
    (head, loss), step = with_others(options)
    for batch in batches[:4]:
        step(batch)
    step.save(tmp_path / "a.pth")
    expected = [step(batch)["loss"].item() for batch in batches[4:]]

    torch.manual_seed(1)
    (other_head, other_loss), other = with_others(options)
    other.load(tmp_path / "a.pth")
    assert [other(batch)["loss"].item() for batch in batches[4:]] == pytest.approx(expected, rel=1e-5)
    assert loss.calls == other_loss.calls == 8
    torch.testing.assert_close(other_loss.scale, loss.scale)
    torch.testing.assert_close(other_head.state_dict(), head.state_dict())


# ---- summary ----------------------------------------------------------------------------------------------


def test_summary_reports_the_graph_and_the_options():
    _, step, _ = parts(dict(COMPILED, accumulate=2, ema=dict(type="threshold"), precision="bf16"))
    assert "step: will be compiled as one graph at the second batch; trained on 0 batches" in step.summary()
    for batch in [*loader(), *loader()][:5]:
        step(batch)
    text = step.summary()
    assert "step: compiled as one graph; trained on 5 batches, 1 of them with the graph" in text
    assert "precision: bf16 (speed.precision)" in text
    assert "accumulation: 2 batches per update; the current accumulation window is unfinished" in text
    assert "average: 2 updates" in text
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
    assert "step: eager, with a compiled model; trained on 4 batches" in text
    assert "warning: The step cannot be compiled as one graph" in text
    assert "outputs.sum().item() > 0" in text


def test_a_file_is_loaded_into_lazy_modules(tmp_path):
    def step():
        model = nn.LazyLinear(2)
        return accelerate(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), F.mse_loss)

    first, second, batch = step(), step(), (torch.ones(2, 3), torch.ones(2, 2))
    first(batch)
    first.save(tmp_path / "step.pth")
    second.load(tmp_path / "step.pth")
    assert torch.equal(first(batch)["loss"], second(batch)["loss"])
