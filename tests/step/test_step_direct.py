"""Tests of `DirectCalls`: verified compiled code is called without Dynamo while its guards hold."""

import pytest
import torch
import torch.nn.functional as F
from graphs import batches, by_hand, graph_step, net, train
from torch import nn
from torch.optim import SGD

from slipstream.optim import OptimWrapper
from slipstream.step.captured import DirectCalls


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def direct(monkeypatch):
    """Record, for each lookup, whether a direct call was found."""
    found, find = [], DirectCalls.find

    def searching(self, *arguments):
        call = find(self, *arguments)
        found.append(call is not None)
        return call

    monkeypatch.setattr(DirectCalls, "find", searching)
    return found


def wrapper(model, **options):
    return OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def make(lr):
    return lambda params: SGD(params, lr=lr, momentum=0.9)


def test_compiled_batches_are_called_directly_from_the_fourth_batch_on(direct):
    model, other = net(), net()
    found = train(graph_step(model, wrapper(model)), batches())
    _, _, losses = by_hand(make(0.1), batches(), model=other)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
    # The first batch runs eagerly, the second verifies the graph, and the third runs through Dynamo.
    assert direct == [False, False, *[True] * 9]


def test_accumulation_windows_are_called_directly(direct):
    model, other = net(), net()
    train(graph_step(model, wrapper(model, accumulative_counts=2)), batches())
    by_hand(make(0.1), batches(), model=other, window=2)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
    assert direct.count(True) >= 5


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].eval(),
        lambda model: setattr(model[3], "p", 0.5),
        lambda model: setattr(model[2], "forward", torch.tanh),
        lambda model: model[0].register_forward_hook(lambda *_: None),
        lambda model: model[1].register_buffer("running_mean", torch.ones(8)),
    ],
    ids=["mode", "rate", "forward", "hook", "buffer"],
)
def test_changes_to_the_model_are_detected(direct, change):
    torch.manual_seed(0)
    model = net(0.1)
    step = graph_step(model, wrapper(model), recover=lambda error: step.eager)
    torch.manual_seed(1)
    found = [train(step, batches()[:6])]
    change(model)
    found.append(train(step, batches()[6:]))

    other = net(0.1)
    optimizer = make(0.1)(other.parameters())
    torch.manual_seed(1)
    losses = [by_hand(lambda _: optimizer, batches()[:6], model=other)[2]]
    change(other)
    losses.append(by_hand(lambda _: optimizer, batches()[6:], model=other)[2])
    torch.testing.assert_close(torch.cat(found), torch.cat(losses), rtol=1e-5, atol=0)
    assert direct[4]
    assert not direct[5]


def test_attributes_that_become_constants_allow_direct_calls(direct):
    class Marked(nn.Linear):
        seen, busy = False, False

        def forward(self, x):
            self.busy = True
            y = super().forward(x)
            self.seen, self.busy = True, False
            return y

    model = nn.Sequential(nn.Flatten(), Marked(108, 8), nn.Linear(8, 4))
    step = graph_step(model, wrapper(model))
    for number in range(8):
        model[1].seen = model[1].seen and number != 6
        train(step, batches()[:1])
        assert model[1].seen
        assert not model[1].busy
    assert direct == [False, False, *[True] * 3, False, True]


def test_error_in_compiled_code_is_raised_and_training_continues():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 4))
    step = graph_step(model, wrapper(model), loss=F.cross_entropy)
    good = (torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))
    train(step, [good] * 4)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(IndexError):
        step((torch.tensor([[0, 9], [2, 3]]), torch.tensor([0, 1])))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert step.uses_graph
    step(good)
    assert not torch.equal(before[0], next(model.parameters()))
