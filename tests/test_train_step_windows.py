"""Test that the accumulation windows of `accelerate` match plain loops, including windows that end with each epoch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate

COMPILED = dict(compile=dict(backend="eager"))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, 4, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(0, 3, (count, 6), generator=generator), strict=True))


def windows_of(data, window, epoch):
    epochs = [data[start : start + epoch] for start in range(0, len(data), epoch)]
    return [part[start : start + window] for part in epochs for start in range(0, len(part), window)]


def by_hand(data, window, epoch, max_norm=None, decay=None):
    """Train with the mean loss of each window; return the model and the average of its weights."""
    model = net()
    optimizer = sgd(model)
    average = None
    for part in windows_of(data, window, epoch):
        optimizer.zero_grad()
        (sum(F.cross_entropy(model(x), y) for x, y in part) / len(part)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        now = copy.deepcopy(model.state_dict())
        average = (
            now
            if average is None
            else {k: decay * average[k] + (1 - decay) * now[k] for k in now}
            if decay
            else now
        )
    return model, average


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **(tolerance or dict(rtol=1e-9, atol=1e-10)))


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("count", "window", "epoch"), [(14, 4, 7), (15, 4, 5), (9, 2, 3), (8, 4, 3), (6, 8, 3)]
)
def test_windows_end_with_each_epoch(compiled, count, window, epoch):
    model = net()
    options = dict(
        accumulate=window, clip_grad=dict(max_norm=0.3), ema=dict(type="constant", decay=0.8), **compiled
    )
    step = accelerate(model, sgd(model), F.cross_entropy, options, batches_per_epoch=epoch)
    data = batches(count)
    for batch in data:
        step(batch)
    # With 3 batches per epoch, a run of 8 batches ends inside an epoch and inside a window.
    whole = count - count % epoch
    expected, average = by_hand(data[:whole] if count % epoch else data, window, epoch, 0.3, 0.8)
    assert_same(model.state_dict(), expected.state_dict())
    assert_same(dict(step.average.module.state_dict()), average)
    assert all((p.grad is None) == (count % epoch == 0) for p in model.parameters())


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("stop", [6, 7, 9])
def test_run_resumes_inside_and_at_the_end_of_a_smaller_window(compiled, stop, tmp_path):
    options, data = dict(accumulate=4, **compiled), batches(14)
    expected, _ = by_hand(data, 4, 7)
    model = net()
    step = accelerate(model, sgd(model), F.cross_entropy, options, batches_per_epoch=7)
    for batch in data[:stop]:
        step(batch)
    torch.save([model.state_dict(), step.state_dict()], tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert ("gradients" in state) == (stop != 7)
    other = net()
    resumed = accelerate(other, sgd(other), F.cross_entropy, options, batches_per_epoch=7)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for batch in data[stop:]:
        resumed(batch)
    assert_same(other.state_dict(), expected.state_dict())


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_window_resumed_with_a_different_size_uses_the_mean_gradient(compiled, accumulate):
    data = batches(8)
    model = net()
    step = accelerate(model, sgd(model), F.cross_entropy, dict(accumulate=4, **compiled))
    for batch in data[:2]:
        step(batch)
    other = copy.deepcopy(model)
    resumed = accelerate(other, sgd(other), F.cross_entropy, dict(accumulate=accumulate, **compiled))
    resumed.load_state_dict(step.state_dict())
    size = {1: 3, 3: 3, 8: 8}[accumulate]  # the window ends at the next multiple of `accumulate`
    for batch in data[2:size]:
        resumed(batch)
    expected, _ = by_hand(data[:size], size, size)
    assert_same(other.state_dict(), expected.state_dict())


# ---- updated ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [({}, 3), ({}, 1), (dict(batches_per_epoch=4), 3), (dict(total_steps=8), 3)],
    ids=str,
)
def test_updated_is_true_after_exactly_the_calls_that_change_the_weights(compiled, lengths, window, tmp_path):
    def make():
        model = net()
        return model, accelerate(
            model, sgd(model), F.cross_entropy, dict(accumulate=window, **compiled), **lengths
        )

    model, step = make()
    assert not step.updated
    found, expected = [], []
    for number, batch in enumerate(batches(8)):
        before = copy.deepcopy(model.state_dict())
        if number == 4:  # the file records whether a window is unfinished
            step.save(tmp_path / "a.pth")
            updated = step.updated
            model, step = make()
            step.load(tmp_path / "a.pth")
            assert step.updated == updated
        step(batch)
        found.append(step.updated)
        expected.append(
            any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        )
    assert found == expected
    assert any(found)
    assert all(found) == (window == 1)


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
def test_batches_without_an_update_log_the_norm_of_the_last_update(compiled):
    model = net()
    step = accelerate(
        model, sgd(model), F.cross_entropy, dict(accumulate=2, clip_grad=dict(max_norm=0.1), **compiled)
    )
    norms = [step(batch).get("grad_norm") for batch in batches(10)]
    assert norms[0] is None
    for number in range(2, 10, 2):
        assert torch.equal(norms[number], norms[number - 1])
    assert len({float(norm) for norm in norms[1:]}) == 5
