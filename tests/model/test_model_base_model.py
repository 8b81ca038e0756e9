from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper


class TupleModel(BaseModel):
    """A model like the one in MMEngine's tutorials."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x, labels, mode):
        scores = self.net(x)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, labels)}
        return (scores, labels) if mode == "predict" else scores


class DictModel(TupleModel):
    def forward(self, inputs, targets=None, mode="tensor"):
        return super().forward(inputs, targets, mode)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 1, 0])


@pytest.mark.parametrize("kind", [tuple, list, namedtuple("Pair", "x labels")._make])
def test_sequence_batch_is_passed_by_position(kind):
    model, (x, labels) = TupleModel(), batch()
    scores, seen = model.val_step(kind((x, labels)))
    torch.testing.assert_close(scores, x @ model.net.weight.T + model.net.bias)
    assert torch.equal(seen, labels)
    assert not scores.requires_grad


def test_dict_batch_is_passed_by_keyword():
    model, (x, labels) = DictModel(), batch()
    assert torch.equal(model.val_step({"targets": labels, "inputs": x})[1], labels)
    assert model.test_step({"inputs": x})[1] is None


def test_train_step_matches_a_manual_step():
    model, (x, labels) = TupleModel(), batch()
    weight, bias = (p.detach().double().requires_grad_() for p in model.net.parameters())
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.3))
    logs = model.train_step((x, labels), optim)

    loss = F.cross_entropy(x.double() @ weight.T + bias, labels)
    loss.backward()
    torch.testing.assert_close(logs["loss"].double(), loss.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.net.weight.double(), weight - 0.3 * weight.grad, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.net.bias.double(), bias - 0.3 * bias.grad, atol=1e-6, rtol=0)
    assert not logs["loss"].requires_grad


def test_train_step_minimizes_the_total_of_an_overridden_parse_losses():
    class Doubled(TupleModel):
        def parse_losses(self, losses):
            total, logs = super().parse_losses(losses)
            return 2 * total, {**logs, "twice": 2 * total.detach()}

    torch.manual_seed(0)
    once, twice = TupleModel(), Doubled()
    twice.load_state_dict(once.state_dict())
    start = once.net.weight.detach().clone()
    for model in (once, twice):
        logs = model.train_step(batch(), OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    torch.testing.assert_close(twice.net.weight - start, 2 * (once.net.weight - start))
    assert logs["twice"] == 2 * logs["loss"]


def test_preprocessor_moves_nested_tensors_to_the_model_device():
    model = TupleModel().to("meta")
    pair = namedtuple("Pair", "a b")
    out = model.data_preprocessor(
        {"x": [torch.ones(1), (torch.ones(2), "name")], "p": pair(torch.ones(3), 4)}
    )
    assert out["x"][0].is_meta
    assert out["x"][1][0].is_meta
    assert out["x"][1][1] == "name"
    assert type(out["p"]).__name__ == "Pair"
    assert out["p"].a.is_meta
    assert out["p"].b == 4
