"""Tests of two steps in one process that share modules or parameters, with and without `compile`."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import COMPILE, STEPS, TOLERANCE, batches, net, seed, warnings_of_slipstream
from torch import nn
from torch.optim import SGD, Adam, AdamW

from slipstream import accelerate

SPEEDS = {"eager": {}, "compiled": dict(compile=COMPILE)}


class Part:
    """One of several steps: a model, an optimizer and a loss."""

    def __init__(self, model, optimizer, loss=F.mse_loss, window=1):
        self.model, self.optimizer, self.loss, self.window = model, optimizer, loss, window

    def by_hand(self):
        """Return a plain step that ignores gradients from other steps.

        Within an accumulation window, the step accumulates only the gradients of its own batches.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept, done = [None] * len(params), 0

        def step(batch):
            nonlocal kept, done
            for param, grad in zip(params, kept, strict=True):
                param.grad = grad
            loss = self.loss(self.model(batch[0]), batch[1])
            (loss / self.window).backward()
            done += 1
            kept = [param.grad for param in params]
            if done % self.window == 0:
                self.optimizer.step()
                kept = [None] * len(params)
            self.optimizer.zero_grad()
            return loss.detach().clone()

        return step

    def by_accelerate(self, speed):
        options = {} if self.window == 1 else dict(accumulate=self.window)
        step = accelerate(self.model, self.optimizer, self.loss, speed={**speed, **options})
        return lambda batch: step(batch)["loss"].clone()


def compare(make, train, speed):
    """Train with a plain loop and with `accelerate`. Losses and states of all models must be equal."""
    found = []
    for by_hand in (True, False):
        torch._dynamo.reset()
        seed()
        parts = make()
        with warnings_of_slipstream() as said:
            steps = [part.by_hand() if by_hand else part.by_accelerate(speed) for part in parts]
            seed(1)
            losses = train(parts, steps)
        assert not [line for line in said if "compiler bug" in line], said
        states = [{name: value.clone() for name, value in part.model.state_dict().items()} for part in parts]
        found.append((torch.stack(losses), states))
    torch.testing.assert_close(found[1][0], found[0][0], **TOLERANCE)
    torch.testing.assert_close(found[1][1], found[0][1], **TOLERANCE)


# ---- adversarial networks ---------------------------------------------------------------------------------


def gan(normed=False, kind=SGD, windows=(1, 1), frozen=False, **options):
    """Return two parts: the generator, whose loss calls the discriminator, and the discriminator."""
    options = {"lr": 0.05, **options}
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    middle = [nn.BatchNorm1d(8)] if normed else []
    discriminator = nn.Sequential(
        nn.Linear(3, 8, bias=not normed), *middle, nn.Tanh(), nn.Linear(8, 1)
    ).double()

    def generator_loss(fake, targets):
        if frozen:
            discriminator.requires_grad_(False)
        value = F.softplus(-discriminator(fake)).mean()
        if frozen:
            discriminator.requires_grad_(True)
        return value

    def discriminator_loss(scores, real):
        return F.binary_cross_entropy_with_logits(scores, real)

    return [
        Part(generator, kind(generator.parameters(), **options), generator_loss, windows[0]),
        Part(discriminator, kind(discriminator.parameters(), **options), discriminator_loss, windows[1]),
    ]


def train_both(parts, steps, first=0):
    """Train both networks on each batch. The discriminator's step computes no gradients for the generator."""
    losses = []
    for x, y in batches(STEPS):
        for number in (first, 1 - first):
            if number == 0:
                losses.append(steps[0]((x, y)))
                continue
            with torch.no_grad():
                fake = parts[0].model(x)
            labels = torch.cat([torch.ones(len(y), 1), torch.zeros(len(fake), 1)]).double()
            losses.append(steps[1]((torch.cat([y, fake]), labels)))
    return losses


def train_generator_on_every_third(parts, steps):
    """Train the generator only on every third batch."""
    losses = []
    for number, (x, y) in enumerate(batches(STEPS)):
        with torch.no_grad():
            fake = parts[0].model(x)
        labels = torch.cat([torch.ones(len(y), 1), torch.zeros(len(fake), 1)]).double()
        losses.append(steps[1]((torch.cat([y, fake]), labels)))
        if number % 3 == 2:
            losses.append(steps[0]((x, y)))
    return losses


GANS = {
    "SGD": (gan, train_both),
    "Adam": (partial(gan, kind=Adam, lr=0.02, betas=(0.5, 0.9)), train_both),
    "generator on every third batch": (gan, train_generator_on_every_third),
    "discriminator frozen by the loss": (partial(gan, frozen=True), train_both),
    "accumulation in both": (partial(gan, windows=(2, 2)), train_both),
}


def _with_speeds(table, fast=()):
    return [
        pytest.param(
            *parts,
            speed,
            id=f"{what}-{name}",
            marks=_marks(what, name, fast),
        )
        for what, parts in table.items()
        for name, speed in SPEEDS.items()
    ]


def _marks(what, name, fast):
    return [] if name == "eager" or what in fast else pytest.mark.matrix


@pytest.mark.parametrize(("make", "train", "speed"), _with_speeds(GANS, fast=["SGD"]))
def test_gan_with_two_steps_matches_a_plain_loop(make, train, speed):
    compare(make, train, speed)


# ---- one model, several optimizers ------------------------------------------------------------------------


def two_optimizers(first, second, windows=(1, 1)):
    """Return two parts with the same model, each with an optimizer for all its parameters."""
    model = net()
    return [
        Part(model, first(model.parameters()), F.mse_loss, windows[0]),
        Part(model, second(model.parameters()), F.l1_loss, windows[1]),
    ]


def halves():
    """Return two parts with the same model, each with an optimizer for one half of the model."""
    model = net()
    return [
        Part(model, SGD(model[:2].parameters(), lr=0.05, momentum=0.9)),
        Part(model, AdamW(model[3:].parameters(), lr=0.02), F.l1_loss),
    ]


def shared_trunk():
    """Return two parts whose models share their first layers, each with an optimizer for all its parameters."""
    trunk = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()).double()
    models = [nn.Sequential(trunk, nn.Linear(8, 3).double()) for _ in range(2)]
    return [Part(model, SGD(model.parameters(), lr=0.05, momentum=0.9)) for model in models]


def alternating(parts, steps):
    return [steps[number % 2](batch) for number, batch in enumerate(batches(STEPS + 2))]


def both(parts, steps):
    return [step(batch) for batch in batches(STEPS) for step in steps]


_SGD, _ADAM = partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=0.02)
SHARED = {
    "alternating SGD and AdamW over all parameters": (partial(two_optimizers, _SGD, _ADAM), alternating),
    "two SGDs over all parameters, on each batch": (partial(two_optimizers, _SGD, _SGD), both),
    "one half of the model each": (halves, both),
    "models that share a trunk, alternating": (shared_trunk, alternating),
}


@pytest.mark.parametrize(
    ("make", "train", "speed"),
    _with_speeds(
        SHARED,
        fast=["one half of the model each"],
    ),
)
def test_steps_that_share_parameters_match_plain_loops(make, train, speed):
    compare(make, train, speed)
