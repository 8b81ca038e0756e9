"""`Recording` detects backward passes that a compiled model does not support."""

import pytest
import torch
from torch import nn

from slipstream.step.replay import Recording


class Outputs(nn.Module):
    """A model that returns two outputs and a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        hidden = self.layer(x)
        return {"scores": hidden * 2, "penalty": [hidden.square()], "scale": self.scale}


def plain(outputs, x):
    (outputs["scores"].sum() + outputs["penalty"][0].sum() + outputs["scale"].sum()).backward()


def with_respect_to_an_output(outputs, x):
    scores = outputs["scores"]
    (grads,) = torch.autograd.grad(scores.square().sum(), scores, create_graph=True)
    (scores.sum() + grads.square().sum()).backward()


def penalty(outputs, x):
    (grads,) = torch.autograd.grad(outputs["scores"].sum(), x, create_graph=True)
    grads.square().sum().backward()


def different_outputs(outputs, x):
    outputs["scores"].sum().backward(retain_graph=True)
    outputs["penalty"][0].sum().backward()


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (plain, None),
        (with_respect_to_an_output, None),
        (penalty, "create_graph=True"),
        (different_outputs, "retain_graph=True"),
    ],
)
def test_unsupported_backward_passes_are_reported(loss, problem):
    model, x = Outputs(), torch.ones(3, 2, requires_grad=True)
    recording = Recording(model, (x,), {})
    loss(recording.run((x,), {}), x)
    assert (recording.problem is None) if problem is None else (problem in recording.problem)
    assert not model.scale._backward_hooks
