"""A small training run with `GraphStep`, and the same run with a plain loop."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.optim import OptimWrapper
from slipstream.step import EagerStep, sum_losses
from slipstream.step.graph import GraphStep

STEPS = 12


def batches(count=STEPS, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, 3, 6, 6, generator=generator)
    return list(zip(inputs, torch.randint(0, 4, (count, size), generator=generator), strict=True))


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def refuse(error):
    raise error


class Counting:
    """A backend that counts graphs and runs them uncompiled."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def graph_step(model, optim, backend=None, recover=refuse, loss=F.cross_entropy, **options):
    def losses(batch):
        return sum_losses({"loss": loss(model(batch[0]), batch[1])})

    eager = EagerStep(losses, model, optim)
    return GraphStep(losses, model, optim, eager, backend or Counting(), recover, **options)


def train(step, data, schedule=None):
    """Train on all batches, calling `schedule(number)` before each step. Return the losses."""
    losses = []
    for number, batch in enumerate(data):
        if schedule is not None:
            schedule(number)
        losses.append(step(batch)["loss"])
    return torch.stack(losses)


def by_hand(make_optimizer, data, schedule=None, model=None, clip=None, window=1):
    """Train with a plain loop. Return the model, the optimizer and the losses."""
    model = net() if model is None else model
    optimizer = make_optimizer(model.parameters())
    losses = []
    for number, (x, y) in enumerate(data):
        if schedule is not None:
            schedule(optimizer, number)
        loss = F.cross_entropy(model(x), y)
        (loss / window).backward()
        if (number + 1) % window == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return model, optimizer, torch.stack(losses)


def in_graph(make_optimizer, data, schedule=None, model=None, backend=None, **wrapper):
    """Train with `GraphStep`. Return the model, the optimizer wrapper and the losses."""
    model = net() if model is None else model
    optim = OptimWrapper(optimizer=make_optimizer(model.parameters()), **wrapper)
    step = graph_step(model, optim, backend)
    change = None if schedule is None else partial(schedule, optim.optimizer)
    return model, optim, train(step, data, change)
