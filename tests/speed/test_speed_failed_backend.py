"""A backend that fails is tried once for the step and once for the model. Training then continues eagerly."""

import logging

import pytest
import torch
import torch.nn.functional as F

from part_runs import Net, batches, sgd
from slipstream.speed.accelerate import accelerate


class Fails:
    """A backend that fails after the first `good` graphs."""

    def __init__(self, good):
        self.good, self.count = good, 0

    def __call__(self, graph, inputs):
        self.count += 1
        if self.count > self.good:
            raise RuntimeError("no such instruction")
        return graph.forward


def train(window, resumed, backend=None):
    torch._dynamo.reset()
    model = Net()
    optimizer = sgd(model.parameters())
    compile = backend and dict(backend=backend, cache=False)
    step = accelerate(model, optimizer, F.cross_entropy, dict(accumulate=window, compile=compile))
    if resumed:
        momenta = {i: {"momentum_buffer": torch.ones_like(p)} for i, p in enumerate(model.parameters())}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": momenta})
    return torch.stack([step(batch)["loss"] for batch in batches()]), step


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("window", "good"), [(1, 0), (3, 0), (3, 1)])
def test_training_continues_after_one_attempt(window, good, resumed, caplog):
    backend = Fails(good)
    with caplog.at_level(logging.WARNING, "slipstream"):
        losses, step = train(window, resumed, backend)
    torch.testing.assert_close(losses, train(window, resumed)[0], rtol=1e-9, atol=1e-12)
    assert step.compiled_scope is None
    said = [record.getMessage() for record in caplog.records]
    assert ["as one graph" in said[0], "cannot be compiled" in said[1], len(said)] == [True, True, 2]
    assert all("no such instruction" in line for line in said)
    assert backend.count == good + 2  # one attempt for the step and one for the model
