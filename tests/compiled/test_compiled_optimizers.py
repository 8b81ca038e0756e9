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
    sgd,
)
from torch import nn, optim
from torch.optim import lr_scheduler

OPTIMIZERS = {
    "SGD": dict(lr=0.05),
    "SGD with momentum": dict(lr=0.05, momentum=0.9),
    "SGD with Nesterov momentum": dict(lr=0.05, momentum=0.9, nesterov=True),
    "SGD with dampening": dict(lr=0.05, momentum=0.9, dampening=0.3),
    "SGD with maximize": dict(lr=0.005, momentum=0.9, maximize=True),
    "SGD with weight decay": dict(lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": dict(lr=0.01),
    "Adam with amsgrad": dict(lr=0.01, amsgrad=True),
    "Adam with weight decay": dict(lr=0.01, weight_decay=0.1),
    "Adam with decoupled decay": dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "AdamW with maximize": dict(lr=0.01, maximize=True),
    "AdamW with amsgrad": dict(lr=0.01, amsgrad=True),
    "NAdam": dict(lr=0.01),
    "NAdam with weight decay": dict(lr=0.01, weight_decay=0.1),
    "NAdam with decoupled decay": dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": dict(lr=0.01),
    "RAdam with weight decay": dict(lr=0.01, weight_decay=0.1),
    "RAdam with decoupled decay": dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": dict(lr=0.01),
    "RMSprop, centered": dict(lr=0.01, centered=True),
    "RMSprop with momentum": dict(lr=0.01, momentum=0.9),
    "RMSprop, centered, with momentum": dict(lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "Adagrad": dict(lr=0.05),
    "Adagrad with decays": dict(lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": dict(lr=1.0),
    "Adamax": dict(lr=0.01),
    "ASGD": dict(lr=0.05),
    "ASGD with averaging from step 4 on": dict(lr=0.05, t0=4, lambd=0.01),
    "Rprop": dict(lr=0.01),
    "Adafactor": dict(lr=0.05),
}

ONE_EACH = (
    "SGD",
    "SGD with Nesterov momentum",
    "Adam with amsgrad",
    "AdamW",
    "NAdam with decoupled decay",
    "RAdam with weight decay",
    "RMSprop, centered, with momentum",
    "Adagrad with decays",
    "Adadelta",
    "Adamax",
    "ASGD with averaging from step 4 on",
    "Rprop",
    "Adafactor",
)
"""At least one case for each optimizer. Only `make exhaustive` runs the others."""


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
            exhaustive=name not in ONE_EACH,
        )
        for name in OPTIMIZERS
    ),
    Case("Muon", muon),
    Case("Adam(foreach=True)", partial(foreach, "Adam", foreach=True)),
    Case("Adam(foreach=False)", partial(foreach, "Adam", foreach=False), exhaustive=True),
    Case("AdamW(fused=True)", partial(foreach, "AdamW", fused=True)),
]
NOT_HERE = [
    Case("LBFGS", lbfgs, REFUSED, "LBFGS", remark="requires a closure", fast=True),
    Case("SparseAdam", partial(sparse_adam, SignEmbedding), FALLS_BACK, "sparse gradients"),
]


# ---- schedules --------------------------------------------------------------------------------------------


SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=12),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
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


def float_then_tensor():
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    lr = torch.tensor(0.01, dtype=torch.float64)
    change = {5: lambda t: t.optimizer.param_groups[0].update(lr=lr), 8: lambda t: lr.mul_(0.5)}
    return Training(model, optimizer, before=change)


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


def betas_in_place():
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    betas = optimizer.param_groups[0]["betas"] = [0.9, 0.99]

    def change(_):
        betas[0] = 0.5

    return Training(model, optimizer, before={6: change})


LARGE, SMALL = (torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.1))
LEARNING_RATES = [
    Case(
        "a float learning rate that is a tensor for one batch",
        partial(tensor_for_one_batch, optim.SGD, "lr", 0.02, LARGE),
        fast=True,
    ),
    Case(
        "a float learning rate of AdamW that is a tensor for one batch",
        partial(tensor_for_one_batch, optim.AdamW, "lr", 0.02, SMALL),
        exhaustive=True,
    ),
    Case(
        "betas that are tensors for one batch",
        partial(tensor_for_one_batch, optim.Adam, "betas", (0.9, 0.99), (LARGE, LARGE)),
    ),
    Case("a list of betas that is changed in place", betas_in_place, fast=True),
    *(
        Case(
            f"a tensor learning rate of {kind.__name__} with {name}",
            partial(tensor_lr, name, kind, **options),
            exhaustive=(name, kind) not in (("StepLR", optim.SGD), ("OneCycleLR", optim.AdamW)),
        )
        for name in SCHEDULERS
        for kind, options in ((optim.SGD, dict(momentum=0.9)), (optim.AdamW, {}))
    ),
    Case("a tensor learning rate, changed in place", partial(changed_lr, "in place"), fast=True),
    Case(
        "a tensor learning rate of Adam, changed in place",
        partial(changed_lr, "in place", optim.Adam),
        exhaustive=True,
    ),
    Case("a tensor learning rate, replaced by new tensors", partial(changed_lr, "replaced")),
    Case("a tensor learning rate, replaced by floats", partial(changed_lr, "by floats"), exhaustive=True),
    Case("a float learning rate, replaced by a tensor", float_then_tensor),
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


def replace_state(training):
    for values in training.optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if name in values:
                values[name] = values[name] * 0.5


def change_state(training):
    for values in training.optimizer.state.values():
        for value in values.values():
            value.mul_(0.5)


def replace_one_state(training):
    training.optimizer.state[training.model[3].weight] = {}


def keep(training):
    training.kept = copy.deepcopy(training.optimizer.state_dict()), copy.deepcopy(training.model.state_dict())


def load_optimizer(training):
    training.optimizer.load_state_dict(training.kept[0])


def load_model(training):
    training.model.load_state_dict(training.kept[1])


def load_assigned(training):
    state = {name: value.clone() for name, value in training.kept[1].items()}
    buffers = {name: value for name, value in state.items() if "weight" not in name and "bias" not in name}
    training.model.load_state_dict(buffers, assign=True, strict=False)


def replace_data(training):
    for param in training.model.parameters():
        param.data = param.data * 0.9


def transpose_data(training):
    weight = training.model[3].weight
    weight.data = weight.data.t().contiguous().t()


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


def leave_gradient_of_frozen(training):
    training.model[0].weight.requires_grad_(False)
    training.model[0].weight.grad = torch.full_like(training.model[0].weight, 0.1)


def change_settings(training):
    training.optimizer.param_groups[0].update(weight_decay=0.3, eps=1e-3, betas=(0.5, 0.9))


def replace_layer(training):
    """Replace an activation layer, which has no parameters."""
    training.model[2] = nn.ReLU()


def change_layer(training):
    training.model[1].momentum, training.model[1].eps = 0.5, 0.1


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
    Case("`optimizer.state` of SGD cleared", between(clear_state, make=sgd)),
    Case("one parameter's optimizer state removed", between(replace_one_state)),
    Case("an optimizer state tensor replaced", between(replace_state, replace_state)),
    Case("an SGD state tensor replaced", between(replace_state, make=sgd), exhaustive=True),
    Case("an optimizer state tensor changed in place", between(change_state)),
    Case("`optimizer.load_state_dict`", between(keep, load_optimizer), fast=True),
    Case(
        "`optimizer.load_state_dict` of SGD, twice", between(keep, load_optimizer, load_optimizer, make=sgd)
    ),
    Case("`model.load_state_dict`", between(keep, load_model)),
    Case("buffers assigned by `model.load_state_dict(..., assign=True)`", between(keep, load_assigned)),
    Case("`param.data` replaced", between(replace_data), fast=True),
    Case("`param.data` with different strides", between(transpose_data)),
    Case("`optimizer.add_param_group`", between(add_group, make=without_last)),
    Case("a layer frozen", between(freeze), exhaustive=True),
    Case("a layer frozen and unfrozen", between(freeze, unfreeze, freeze)),
    Case("`eval()` of BatchNorm", between(evaluate), exhaustive=True),
    Case("`eval()` and `train()` of BatchNorm", between(evaluate, train, evaluate)),
    Case("different optimizer settings", between(change_settings)),
    Case("an activation layer replaced", between(replace_layer)),
    Case("a layer's settings changed", between(change_layer)),
    Case("a gradient before the first step", partial(existing_gradient, 0), fast=True),
    Case("a gradient before step 5", partial(existing_gradient, 5)),
    Case("a gradient before step 5, with SGD", partial(existing_gradient, 5, sgd), exhaustive=True),
    Case("a frozen parameter with a gradient", between(leave_gradient_of_frozen)),
]


CASES = [*ALL, *LEARNING_RATES, *MID_RUN]
GROUPS = {
    "Optimizers from `torch.optim`": [*ALL, *NOT_HERE],
    "Tensor learning rates and betas": LEARNING_RATES,
    "Changes during training": MID_RUN,
}


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of([*CASES, *NOT_HERE]))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


@pytest.mark.parametrize("case", params_of(NOT_HERE[:1], fast_only=True))
def test_unsupported_optimizer_raises_an_error_without_compile(case):
    check_refused(case)
