"""Test that training with `accelerate` matches plain loops, and that invalid arguments raise errors."""

import copy
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from slipstream.errors import DataError, LossError, ModelError
from slipstream.step import EagerStep
from slipstream.step.graph import GraphStep
from slipstream.train_step import accelerate

GRAPH = dict(backend="eager")
RESUMED = dict(accumulate=3, ema=dict(type="threshold", decay=0.9, begin_iter=3))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count=12, size=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, 4, generator=generator)
    return list(zip(x, torch.randint(0, 3, (count, size), generator=generator), strict=True))


def sgd(model, lr=0.1):
    return SGD(model.parameters(), lr=lr, momentum=0.9)


def by_hand(data=None, window=1, max_norm=None, each=lambda model, number: None, schedule=None):
    """Train with a plain loop that calls `each(model, number)` after optimizer step `number`, counted from 1."""
    model, losses = net(), []
    optimizer = sgd(model)
    scheduler = schedule and schedule(optimizer)
    data = data or batches()
    for number, (x, y) in enumerate(data, 1):
        loss = F.cross_entropy(model(x), y)
        (loss / window).backward()
        if number % window == 0:
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            each(model, number // window)
        if scheduler:
            scheduler.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def train(data=None, loss_fn=F.cross_entropy, total_steps=None, **speed):
    model = net()
    step = accelerate(model, sgd(model), loss_fn, speed, total_steps)
    return model, torch.stack([step(batch)["loss"] for batch in data or batches()]), step


def assert_same(model, other, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=rtol, atol=atol)


# ---- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [None, GRAPH, dict(scope="model", backend="eager")])
@pytest.mark.parametrize("options", [{}, dict(accumulate=3, clip_grad=dict(max_norm=0.2))])
def test_accelerate_matches_a_plain_training_loop(how, options):
    hand, expected = by_hand(window=options.get("accumulate", 1), max_norm=options and 0.2)
    model, losses, step = train(compile=how, **options)
    assert type(step.inner) is (GraphStep if how is GRAPH else EagerStep)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert_same(model, hand)
    assert step.model is model


# ---- batches and losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [None, GRAPH])
def test_losses_in_a_dict_are_summed_and_other_entries_are_logged(how):
    def losses(scores, targets):
        loss = F.cross_entropy(scores, targets)
        return {
            "loss_one": loss / 4,
            "loss_two": [loss / 2, loss / 4],
            "accuracy": (scores.argmax(1) == targets).float(),
        }

    with pytest.raises(LossError, match="'accuracy' has shape"):
        train(loss_fn=losses, compile=how)

    def scalars(scores, targets):
        found = losses(scores, targets)
        return {**found, "accuracy": found["accuracy"].mean()}

    model, total, step = train(loss_fn=scalars, compile=how)
    hand, expected = by_hand()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert_same(model, hand)
    log = step(batches()[0])
    assert list(log) == ["loss", "loss_one", "loss_two", "accuracy"]
    torch.testing.assert_close(log["loss_two"], log["loss"] * 0.75)


@pytest.mark.parametrize("batch", [torch.ones(3), (torch.ones(3),), {"x": torch.ones(3)}])
@pytest.mark.parametrize("how", [None, GRAPH])
def test_training_continues_after_an_invalid_batch(batch, how):
    model = net()
    step = accelerate(model, sgd(model), F.cross_entropy, dict(compile=how))
    with pytest.raises(
        (DataError, TypeError), match=r"must be \(inputs, targets\) or a dict, not a|argument 'x'"
    ):
        step(batch)
    step(batches()[0])
    assert step.steps == 1


# ---- averages ---------------------------------------------------------------------------------------------


def by_formula(how, window=1, begin=0):
    """Return the averaged weights of a plain loop. The first update copies the weights."""
    average, updates = {}, [0]
    decays = {
        "constant": lambda step: how["decay"],
        "threshold": lambda step: min(how["decay"], (1 + step) / (10 + step)),
        "swa": lambda step: (step - 1) / step,
    }

    def each(model, number):
        if number * window < begin:
            return
        state = {k: v.clone() for k, v in model.state_dict().items() if v.is_floating_point()}
        updates[0] += 1
        decay = decays[how["type"]](updates[0])
        average.update({k: decay * average.get(k, v) + (1 - decay) * v for k, v in state.items()})

    by_hand(window=window, each=each)
    return average


@pytest.mark.parametrize("compile", [None, GRAPH, dict(scope="model", backend="eager")])
@pytest.mark.parametrize(
    ("ema", "window"),
    [
        (dict(type="constant", decay=0.8), 1),
        (dict(type="constant", decay=0.8, begin_iter=5), 1),
        (dict(type="constant", decay=0.8), 3),
        (dict(type="threshold", decay=0.7), 1),
        (dict(type="swa"), 1),
    ],
)
def test_weights_are_averaged_after_each_update(compile, ema, window):
    model, _, step = train(compile=compile, ema=ema, accumulate=window)
    expected = by_formula(ema, window, ema.get("begin_iter", 0))
    found = step.average.module.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found["0.weight"], model[0].weight, atol=1e-4)


def test_averaged_swaps_weights_only_inside_the_context():
    ema = dict(type="constant", decay=0.8)
    whole, losses, reference = train(compile=GRAPH, ema=ema)
    model, _, step = train(batches()[:9], compile=GRAPH, ema=ema)
    raw, average = model[0].weight.clone(), step.average.module[0].weight.clone()
    with step.averaged() as inside:
        assert inside is model
        assert torch.equal(model[0].weight, average)
        model.eval()(batches()[0][0])
    assert torch.equal(model.train()[0].weight, raw)
    with pytest.raises(ZeroDivisionError), step.averaged():
        1 / 0  # noqa: B018
    for batch, loss in zip(batches()[9:], losses[9:], strict=True):
        torch.testing.assert_close(step(batch)["loss"], loss, rtol=0, atol=0)
    assert_same(model, whole, rtol=0, atol=0)
    assert_same(step.average, reference.average, rtol=0, atol=0)


@pytest.mark.parametrize("compile", [None, GRAPH])
def test_step_within_averaged_raises_an_error_and_changes_nothing(compile):
    model, _, step = train(compile=compile, ema=dict(type="constant", decay=0.8))
    weights, average = copy.deepcopy(model.state_dict()), copy.deepcopy(step.average.state_dict())
    with (
        step.averaged(),
        pytest.raises(
            ModelError, match=r"cannot be called inside `with step\.averaged\(\)`.* after the block"
        ),
    ):
        step(batches()[0])
    assert step.steps == 12
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(step.average.state_dict(), average, rtol=0, atol=0)
    step(batches()[0])


# ---- resume -----------------------------------------------------------------------------------------------


@functools.cache
def uninterrupted(compiled):
    model, losses, step = train(compile=GRAPH if compiled else None, **RESUMED)
    step.close()
    return model, losses, step.average


@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [*((how, how, stop) for how in (None, GRAPH) for stop in (4, 6, 7)), (None, GRAPH, 4), (GRAPH, None, 7)],
)
def test_state_dict_resumes_training_with_and_without_compile(before, after, stop, tmp_path):
    whole, expected, average = uninterrupted(after is GRAPH)
    model, _, step = train(batches()[:stop], compile=before, **RESUMED)
    torch.save({"model": model.state_dict(), "step": step.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other = net()
    resumed = accelerate(other, sgd(other, lr=7.0), F.cross_entropy, dict(RESUMED, compile=after))
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["step"])
    losses = torch.stack([resumed(batch)["loss"] for batch in batches()[stop:]])
    exact = dict(rtol=0, atol=0) if before is after else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, expected[stop:], **exact)
    assert_same(other, whole, **exact)
    assert_same(resumed.average, average, **exact)


def test_last_accumulation_window_is_smaller_with_total_steps():
    model, _, step = train(batches(5), accumulate=4, total_steps=5, compile=GRAPH)
    assert step.steps == 5
    hand = net()
    optimizer = sgd(hand)
    for window in (batches(5)[:4], batches(5)[4:]):
        for x, y in window:
            (F.cross_entropy(hand(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, hand)


# ---- processes ----------------------------------------------------------------------------------------


def test_close_logs_the_compile_report(caplog):
    model = net()
    step = accelerate(model, SGD(model.parameters(), lr=0.1), F.cross_entropy, speed=dict(compile=GRAPH))
    for _ in range(2):  # the first step runs eagerly
        step((torch.randn(4, 4), torch.tensor([0, 1, 2, 0])))
    gc.collect()  # closes the steps that other tests left open
    with caplog.at_level("INFO", logger="slipstream"):
        step.close()
        step.close()
    told = [r.getMessage() for r in caplog.records if r.name == "slipstream"]
    assert len([text for text in told if text.startswith("torch.compile: 1 graph, no graph breaks")]) == 1
