"""Tests of every optimizer in torch.optim, tensor learning rates, and changes during training."""

import copy
from functools import partial

import pytest
import torch
from compiled_runs import (
    FALLS_BACK,
    IN_FLOAT32,
    REFUSED,
    TOLERANCE,
    Case,
    Training,
    check,
    check_plain,
    check_refused,
    net,
    params_of,
)
from torch import nn, optim
from torch.optim import lr_scheduler

OPTIMIZERS = {
    "SGD": dict(lr=0.05),
    "SGD with Nesterov momentum": dict(lr=0.05, momentum=0.9, nesterov=True),
    "Adam with amsgrad": dict(lr=0.01, amsgrad=True),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "NAdam with decoupled decay": dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam with weight decay": dict(lr=0.01, weight_decay=0.1),
    "RMSprop, centered, with momentum": dict(lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "Adagrad with decays": dict(lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": dict(lr=1.0),
    "Adamax": dict(lr=0.01),
    "ASGD with averaging from step 4 on": dict(lr=0.05, t0=4, lambd=0.01),
    "Rprop": dict(lr=0.01),
    "Adafactor": dict(lr=0.05),
}


def by_name(name):
    kind = getattr(optim, name.replace(",", " ").split()[0])
    model = net()
    return Training(model, kind(model.parameters(), **OPTIMIZERS[name]))


def muon():
    """Return a run with Muon. The layers have no biases, because Muon supports only 2D parameters."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    return Training(model, optim.Muon(model.parameters(), lr=0.05))


def foreach(name, **how):
    model = net()
    return Training(model, getattr(optim, name)(model.parameters(), lr=0.01, **how))


def lbfgs():
    model = net()
    return Training(model, optim.LBFGS(model.parameters()))


class SignEmbedding(nn.Module):
    """A network that embeds the sign of each input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 3, sparse=True).double()

    def forward(self, x):
        return self.table((x > 0).long()).sum(1)


def sparse_adam(module=net):
    model = module()
    return Training(model, optim.SparseAdam(list(model.parameters())))


ALL = [
    *(
        Case(
            name,
            partial(by_name, name),
            fast=name == "AdamW",
            tolerance=IN_FLOAT32 if "RAdam" in name or "NAdam" in name else TOLERANCE,
        )
        for name in OPTIMIZERS
    ),
    Case("Muon", muon),
    Case("AdamW(fused=True)", partial(foreach, "AdamW", fused=True)),
]
NOT_HERE = [
    Case("LBFGS", lbfgs, REFUSED, "LBFGS", fast=True),
    Case("SparseAdam", partial(sparse_adam, SignEmbedding), FALLS_BACK, "sparse gradients"),
]


# ---- schedules --------------------------------------------------------------------------------------------


SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=14),
}


def tensor_lr(scheduler, kind, **options):
    model = net()
    optimizer = kind(model.parameters(), lr=torch.tensor(0.02, dtype=torch.float64), **options)
    schedule = SCHEDULERS[scheduler](optimizer)
    lr = lambda: float(optimizer.param_groups[0]["lr"])  # noqa: E731
    return Training(model, optimizer, after=schedule.step, observe=lr)


def changed_lr(how, kind=optim.SGD):
    """Change a tensor learning rate in place, or replace it with a new tensor or a float."""
    model = net()
    optimizer = kind(model.parameters(), lr=torch.tensor(0.02, dtype=torch.float64))
    group = optimizer.param_groups[0]
    act = {
        "in place": lambda: group["lr"].mul_(0.8),
        "replaced": lambda: group.update(lr=group["lr"] * 0.8),
        "by floats": lambda: group.update(lr=float(group["lr"]) * 0.8),
    }[how]
    return Training(model, optimizer, after=act, observe=lambda: float(group["lr"]))


def tensor_for_one_batch(kind, key, value, other):
    """In batch 5, a setting is a tensor (or contains tensors). In all other batches, it has its original value."""
    model = net()
    optimizer = kind(model.parameters(), **{"lr": 0.02, key: value})
    group = optimizer.param_groups[0]
    return Training(
        model,
        optimizer,
        before={5: lambda _: group.update({key: other}), 6: lambda _: group.update({key: value})},
    )


LARGE, SMALL = (torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.1))
LEARNING_RATES = [
    Case(
        "a float learning rate that is a tensor for one batch",
        partial(tensor_for_one_batch, optim.SGD, "lr", 0.02, LARGE),
        fast=True,
    ),
    Case("a tensor learning rate of SGD with StepLR", partial(tensor_lr, "StepLR", optim.SGD, momentum=0.9)),
    Case("a tensor learning rate of AdamW with OneCycleLR", partial(tensor_lr, "OneCycleLR", optim.AdamW)),
    Case("a tensor learning rate, changed in place", partial(changed_lr, "in place"), fast=True),
]


# ---- changes during training ------------------------------------------------------------------------------


def adamw(model):
    return optim.AdamW(model.parameters(), lr=0.02)


def between(*changes, make=adamw, module=net):
    """Return a function that builds a run with these changes before steps 5, 7 and 9."""

    def build():
        model = module()
        return Training(model, make(model), before=dict(zip((5, 7, 9), changes, strict=False)))

    return build


def clear_state(training):
    training.optimizer.state.clear()


def keep(training):
    training.kept = copy.deepcopy(training.optimizer.state_dict()), copy.deepcopy(training.model.state_dict())


def load_optimizer(training):
    training.optimizer.load_state_dict(training.kept[0])


def load_model(training):
    training.model.load_state_dict(training.kept[1])


def add_group(training):
    training.model[3].weight.grad = None  # by then, the plain loop has accumulated the gradients of all steps
    training.optimizer.add_param_group({"params": [training.model[3].weight], "lr": 0.01})


def without_last(model):
    return optim.AdamW([p for p in model.parameters() if p is not model[3].weight], lr=0.02)


def freeze(training):
    training.model[0].requires_grad_(False)


def unfreeze(training):
    training.model[0].requires_grad_(True)


def evaluate(training):
    training.model[1].eval()


def train(training):
    training.model[1].train()


def leave_gradient(training):
    for param in training.model.parameters():
        param.grad = torch.full_like(param, 0.1)


def change_settings(training):
    training.optimizer.param_groups[0].update(weight_decay=0.3, eps=1e-3, betas=(0.5, 0.9))


def existing_gradient(at, make=adamw):
    model = net()
    training = Training(model, make(model))
    if at:
        training.before[at] = leave_gradient
    else:
        leave_gradient(training)
    return training


MID_RUN = [
    Case("`optimizer.state` cleared", between(clear_state), fast=True),
    Case("`optimizer.load_state_dict`", between(keep, load_optimizer), fast=True),
    Case("`model.load_state_dict`", between(keep, load_model)),
    Case("`optimizer.add_param_group`", between(add_group, make=without_last)),
    Case("a layer frozen and unfrozen", between(freeze, unfreeze, freeze)),
    Case("`eval()` and `train()` of BatchNorm", between(evaluate, train, evaluate)),
    Case("different optimizer settings", between(change_settings)),
    Case("a gradient before the first step", partial(existing_gradient, 0), fast=True),
    Case("a gradient before step 5", partial(existing_gradient, 5)),
]


CASES = [*ALL, *LEARNING_RATES, *MID_RUN]


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of([*CASES, *NOT_HERE]))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


@pytest.mark.parametrize("case", params_of(NOT_HERE[:1], fast_only=True))
def test_unsupported_optimizer_raises_an_error_without_compile(case):
    check_refused(case)
