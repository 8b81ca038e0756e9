"""On devices where `Module.to` replaces parameters, a step raises an error if a trained parameter was replaced.

On other devices, parameters are not checked.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate
from slipstream.errors import ModelError
from slipstream.optim import OptimWrapper
from slipstream.step import trained_parameters
from slipstream.step.trained_parameters import add_parameter_check


@pytest.fixture
def _replacing(monkeypatch):
    """Treat the CPU like a device on which `Module.to` replaces parameters."""
    monkeypatch.setattr(trained_parameters, "keeps_parameters", lambda device: False)


def training():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, accelerate(model, optimizer, F.cross_entropy, speed=None)


BATCH = (torch.ones(2, 3), torch.tensor([0, 1]))


def test_parameters_are_not_checked_on_devices_that_do_not_replace_them():
    model = nn.Linear(3, 2)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    assert add_parameter_check(len, model, optim) is len


@pytest.mark.usefixtures("_replacing")
def test_replaced_parameter_raises_an_error():
    model, _, step = training()
    step(BATCH)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(ModelError, match=r"'1\.weight' was replaced"):
        step(BATCH)


@pytest.mark.usefixtures("_replacing")
def test_new_parameter_that_was_added_to_the_optimizer_is_trained():
    model, optimizer, step = training()
    step(BATCH)
    model[1].bias = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [model[1].bias]})
    for _ in range(2):
        step(BATCH)
    assert model[1].bias.any()
    model[1].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ModelError, match=r"'1\.bias' was replaced"):
        step(BATCH)


@pytest.mark.usefixtures("_replacing")
def test_new_layer_and_frozen_parameter_are_allowed():
    model, optimizer, step = training()
    model[0].weight = nn.Parameter(torch.ones(4, 3), requires_grad=False)
    model[1] = nn.Linear(4, 2)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    before = model[1].weight.detach().clone()
    step(BATCH)
    assert not torch.equal(model[1].weight, before)
