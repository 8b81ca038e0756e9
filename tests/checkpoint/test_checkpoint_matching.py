"""Tests of `check_optimizer`, which compares a saved optimizer state with the optimizer that loads it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from slipstream.checkpoint import check_optimizer
from slipstream.checkpoint.matching import MismatchError
from slipstream.errors import CheckpointError

OPTIONS = [
    ("SGD", {}),
    ("SGD", dict(momentum=0.9)),
    ("Adam", dict(amsgrad=True)),
    ("AdamW", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("RMSprop", dict(centered=True, momentum=0.9)),
    ("Rprop", {}),
    ("Adafactor", {}),
    ("LBFGS", {}),
]


def optimizer(name, options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)


def saved_state(name, options):
    net, optim = optimizer(name, options)

    def closure():
        optim.zero_grad()
        loss = net(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    optim.step(closure)
    file = io.BytesIO()
    torch.save(optim.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_state_of_the_same_optimizer_is_accepted(name, options):
    check_optimizer(optimizer(name, options)[1], saved_state(name, options), "optimizer", "a.pth")


@pytest.mark.parametrize(("name", "options"), OPTIONS[1:12], ids=str)
def test_each_entry_must_have_the_shape_of_the_parameter(name, options):
    saved = saved_state(name, options)
    for key in saved["state"][0].keys() - {"step", "eta", "mu", "mu_product"}:
        changed = copy.deepcopy(saved)
        changed["state"][0][key] = torch.zeros(7, 7)
        with pytest.raises(CheckpointError, match=rf"'optimizer\.state\[0\]\.{key}' must be"):
            check_optimizer(optimizer(name, options)[1], changed, "optimizer", "a.pth")


def test_different_groups_and_parameters_are_rejected():
    saved = saved_state("SGD", {})
    net = nn.Linear(3, 2)
    two = torch.optim.SGD([dict(params=[net.weight]), dict(params=[net.bias])], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"contain \[2\] parameters, but the optimizer's groups contain \["
    ):
        check_optimizer(two, saved, "optimizer", "a.pth")
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\.betas' is missing"):
        check_optimizer(optimizer("Adam", {})[1], saved, "optimizer", "a.pth")


def test_mismatch_separates_the_problem_from_the_remedy_also_after_pickling():
    with pytest.raises(MismatchError) as caught:
        check_optimizer(optimizer("SGD", {})[1], {"state": {}, "param_groups": []}, "optimizer", "a.pth")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error) == error.problem + error.remedy
        assert "load_from" in error.remedy
        assert "load_from" not in error.problem
