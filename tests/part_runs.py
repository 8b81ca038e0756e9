"""Train small float64 models with options that are step parts, and with an equivalent plain loop."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from slipstream.model import BaseModel, unwrap_model
from slipstream.runner import Runner
from slipstream.step.graph import GraphStep
from slipstream.train_step import accelerate

STEPS, BATCH, MAX_NORM = 8, 6, 0.3
GRAPH = dict(scope="step", backend="aot_eager", cache=False)
HOW = {"eager": None, "compiled": GRAPH}
TOGETHER = dict(accumulate=2, clip_grad=dict(max_norm=MAX_NORM), ema=dict(type="swa", interval=2))
"""Options that every step part must support."""


def block():
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh())


class Net(BaseModel):
    """A network with BatchNorm, repeated blocks and a head."""

    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.blocks = nn.ModuleList([block(), block(), block()])
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x, y=None, mode="tensor"):
        x = self.norm(self.stem(x))
        for layer in self.blocks:
            x = x + layer(x)
        x = self.head(x.mean((2, 3)))
        return {"loss": F.cross_entropy(x, y)} if mode == "loss" else x


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count * BATCH,), generator=generator)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-4)


def plain_gradients(model, params, loss_of):
    return list(torch.autograd.grad(loss_of(), params))


def by_hand(
    make_optimizer=sgd,
    gradients=plain_gradients,
    change=lambda params, grads: grads,
    groups=lambda model, optimizer: None,
    together=False,
    model=None,
    data=None,
):
    """Train with a plain loop. Return the losses, the final weights and the average of the weights (or None).

    Args:
        gradients: `gradients(model, params, loss_of)` returns the gradients of a batch.
        change: `change(params, grads)` returns the modified gradients of an accumulation window.
        groups: `groups(model, optimizer)` modifies the optimizer's parameter groups, one for each parameter.
        together: accumulate and clip gradients and average the weights, as the options in `TOGETHER` do.
    """
    model = Net() if model is None else model
    params = list(model.parameters())
    optimizer = make_optimizer([{"params": [param]} for param in params])
    groups(model, optimizer)
    window = 2 if together else 1
    held, losses, seen = [0.0] * len(params), [], []
    for number, (x, y) in enumerate(data or batches(), 1):
        found = []

        def loss_of(x=x, y=y, found=found):
            found.append(F.cross_entropy(model(x), y))
            return found[-1]

        grads = gradients(model, params, loss_of)
        held = [old + grad / window for old, grad in zip(held, grads, strict=True)]
        losses.append(found[0].detach())
        if number % window:
            continue
        held = change([param.detach() for param in params], held)
        if together:
            norm = torch.cat([grad.flatten() for grad in held]).norm()
            held = [grad * min(1.0, MAX_NORM / (float(norm) + 1e-6)) for grad in held]
        for param, grad in zip(params, held, strict=True):
            param.grad = grad
        optimizer.step()
        held = [0.0] * len(params)
        seen.append(copy.deepcopy(model.state_dict()))
    average = _mean(seen[::2]) if together else None
    return torch.stack(losses), dict(model.state_dict()), average


def _mean(states):
    return {
        name: sum(state[name] for state in states) / len(states)
        for name, value in states[0].items()
        if value.is_floating_point()
    }


def trained(how, make_optimizer=sgd, together=False, model=None, data=None, **options):
    """Train with `accelerate`. Return the same values as `by_hand`."""
    torch._dynamo.reset()
    model = Net() if model is None else model
    options = dict(options, compile=HOW[how], **(TOGETHER if together else {}))
    step = accelerate(model, make_optimizer(model.parameters()), F.cross_entropy, options)
    losses = torch.stack([step(batch)["loss"] for batch in data or batches()])
    assert step.compiled_scope == ("step" if how == "compiled" else None)
    return losses, dict(model.state_dict()), _average(step.average)


def run(folder, how, together=False, model=None, optimizer=None, hooks=(), **options):
    """Train with a Runner. Return the same tuple as `by_hand`, with None in place of the losses, and the Runner."""
    torch._dynamo.reset()
    x, y = map(torch.cat, zip(*batches(), strict=True))
    runner = Runner(
        model=Net() if model is None else model,
        work_dir=str(folder),
        train_dataloader=dict(
            batch_size=BATCH,
            dataset=TensorDataset(x, y),
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=optimizer or dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9, weight_decay=0.01)),
        default_hooks=dict(checkpoint=None),
        custom_hooks=list(hooks),
        randomness=dict(seed=0),
        log_level="ERROR",
        speed=dict(options, compile=HOW[how], **(TOGETHER if together else {})),
    )
    runner.train()
    if how == "compiled":
        assert isinstance(runner.step, GraphStep)
        assert runner.step.uses_graph
    average = next((hook.ema_model for hook in runner.hooks if hasattr(hook, "ema_model")), None)
    return (None, dict(unwrap_model(runner.model).state_dict()), _average(average)), runner


def _average(average):
    state = average and average.module.state_dict()
    return state and {name: value for name, value in state.items() if value.is_floating_point()}


def assert_equal(found, expected, rtol=1e-9, atol=1e-12):
    """Compare losses (if both runs have them), weights and averages."""
    for mine, theirs in zip(found, expected, strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def differ(found, other):
    """Return whether the final weights differ, to detect options that have no effect."""
    return any(not torch.allclose(found[1][name], other[1][name], rtol=1e-4) for name in found[1])
