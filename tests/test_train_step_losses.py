"""Test that `accelerate` matches plain loops for dict batches, losses computed by the model, and several models."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream import accelerate
from slipstream.errors import LossError

SPEEDS = [
    pytest.param({}, id="eager"),
    pytest.param(dict(compile=dict(backend="eager")), id="graph"),
    pytest.param(dict(compile=dict(scope="model", backend="eager")), id="model"),
    pytest.param(
        dict(compile=dict(backend="eager"), accumulate=2, clip_grad=dict(max_norm=0.3)), id="accumulation"
    ),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@dataclass
class Output:
    """A model output with a loss and logits, like the outputs of transformers models."""

    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, kind="dict"):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 3)
        self.kind = kind

    def forward(self, ids, labels=None, mask=None):
        hidden = self.embedding(ids) * mask[..., None]
        logits = self.head(torch.tanh(hidden.sum(1)))
        loss, penalty = F.cross_entropy(logits, labels), logits.pow(2).mean()
        return {
            "dict": {"loss": loss + penalty, "aux_loss": penalty, "logits": logits, "hidden": (hidden,)},
            "terms": {"loss_class": loss, "loss_penalty": penalty, "accuracy": loss.detach() * 0},
            "object": Output(loss + penalty, logits),
            "tensor": loss + penalty,
        }[self.kind]


def text(count=8):
    generator = torch.Generator().manual_seed(2)
    draw = torch.randint
    return [
        {
            "ids": draw(0, 10, (4, 5), generator=generator),
            "labels": draw(0, 3, (4,), generator=generator),
            "mask": draw(0, 2, (4, 5), generator=generator).double(),
        }
        for _ in range(count)
    ]


def model_of(make):
    torch.manual_seed(0)
    return make().double()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loop(data, model, loss_of, window=1, max_norm=None):
    """Train with a plain loop, and return the losses."""
    optimizer, losses = sgd(model), []
    for number, batch in enumerate(data, 1):
        loss = loss_of(batch)
        (loss / window).backward()
        losses.append(loss.detach())
        if number % window == 0:
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


def assert_trains_like_a_loop(speed, make, data, loss_of, *loss_fn, **options):
    mine, plain = model_of(make), model_of(make)
    step = accelerate(mine, sgd(mine), *loss_fn, speed=speed, **options)
    losses = torch.stack([step(batch)["loss"] for batch in data])
    window = dict(window=2, max_norm=0.3) if "accumulate" in speed else {}
    expected = loop(data, plain, lambda batch: loss_of(plain, batch), **window)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mine.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    assert step.compiled_scope == (speed["compile"].get("scope", "step") if "compile" in speed else None)
    return step


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("kind", ["dict", "object", "tensor", "terms"])
def test_model_computes_its_own_loss_from_a_dict_batch(speed, kind):
    def loss_of(model, batch):
        out = model(**batch)
        if kind == "terms":
            return out["loss_class"] + out["loss_penalty"]
        return {"dict": lambda: out["loss"], "object": lambda: out.loss, "tensor": lambda: out}[kind]()

    step = assert_trains_like_a_loop(speed, lambda: Classifier(kind), text(), loss_of)
    expected = {
        "dict": {"loss", "aux_loss"},
        "object": {"loss"},
        "tensor": {"loss"},
        "terms": {"loss", "loss_class", "loss_penalty", "accuracy"},
    }
    assert set(step(text()[0])) - {"grad_norm"} == expected[kind]


# ---- several models -----------------------------------------------------------------------------------


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def vectors(count=8, width=4):
    return list(torch.randn(count, 6, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


@pytest.mark.parametrize("speed", SPEEDS)
def test_student_learns_from_a_teacher(speed):
    teacher = model_of(lambda: network(4, 3)).eval().requires_grad_(False)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}

    def distill(student, batch):
        with torch.no_grad():
            targets = teacher(batch).softmax(1)
        return {
            "loss_distill": F.cross_entropy(student(batch), targets),
            "loss_l1": student(batch).abs().mean(),
        }

    def by_hand(student, batch):
        return sum(distill(student, batch).values())

    def make():
        net = network(4, 3)
        nn.init.normal_(net[0].weight, std=0.3)  # differs from the teacher's
        return net

    assert_trains_like_a_loop(speed, make, vectors(), by_hand, compute_loss=distill)
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)


def gan():
    torch.manual_seed(4)
    return network(2, 4).double(), network(4, 1).double()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))


def discriminator_loss(generator, discriminator, real, noise):
    with torch.no_grad():
        fake = generator(noise)
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()


def generator_loss(generator, discriminator, noise):
    return F.softplus(-discriminator(generator(noise))).mean()


def assert_gan_matches_a_plain_loop(speed, make, batches):
    generator, discriminator = make()
    step_d = accelerate(
        discriminator,
        adam(discriminator),
        speed=speed,
        compute_loss=lambda model, batch: discriminator_loss(generator, model, *batch),
    )
    step_g = accelerate(
        generator,
        adam(generator),
        speed=speed,
        compute_loss=lambda model, noise: generator_loss(model, discriminator, noise),
    )
    hand_g, hand_d = make()
    adam_g, adam_d = adam(hand_g), adam(hand_d)
    for real, noise in batches:
        found = [step_d((real, noise))["loss"], step_g(noise)["loss"]]
        adam_d.zero_grad()
        loss_d = discriminator_loss(hand_g, hand_d, real, noise)
        loss_d.backward()
        adam_d.step()
        adam_g.zero_grad()
        loss_g = generator_loss(hand_g, hand_d, noise)
        loss_g.backward()
        adam_g.step()
        expected = torch.stack([loss_d.detach(), loss_g.detach()])
        torch.testing.assert_close(torch.stack(found), expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(generator.state_dict(), hand_g.state_dict(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(discriminator.state_dict(), hand_d.state_dict(), rtol=1e-7, atol=1e-10)
    assert all(param.grad is None for param in discriminator.parameters())
    return step_d.compiled_scope, step_g.compiled_scope


@pytest.mark.parametrize("speed", SPEEDS[:3])
def test_gan_trains_like_a_plain_loop(speed):
    batches = zip(vectors(), vectors(width=2), strict=True)
    scopes = assert_gan_matches_a_plain_loop(speed, gan, batches)
    if "compile" in speed:
        assert set(scopes) == {speed["compile"].get("scope", "step")}


class Recomputed(nn.Sequential):
    """A network that is recomputed in the backward pass, and whose gradients reach all leaves."""

    def forward(self, x):
        run = super().forward
        return checkpoint(run, x.requires_grad_(), use_reentrant=True) if torch.is_grad_enabled() else run(x)


def test_generator_with_a_reentrant_checkpoint_leaves_the_discriminator_alone():
    def make():
        generator, discriminator = gan()
        return Recomputed(*generator), discriminator

    batches = [(real, noise.clone()) for real, noise in zip(vectors(), vectors(width=2), strict=True)]
    assert_gan_matches_a_plain_loop({}, make, batches)


def test_compiled_discriminator_sees_new_batch_sizes_twice_before_its_update():
    def make():
        generator, discriminator = gan()
        discriminator.insert(1, nn.BatchNorm1d(discriminator[0].out_features).double())
        return generator, discriminator

    speed = dict(compile=dict(scope="model", backend="aot_eager"))
    sizes = [3, 4, 5, 3, 5, 4]
    batches = [
        (real[:size], noise[:size])
        for size, real, noise in zip(sizes, vectors(), vectors(width=2), strict=False)
    ]
    assert assert_gan_matches_a_plain_loop(speed, make, batches) == ("model", "model")


# ---- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["loss_fn", "compute_loss"])
def test_a_total_next_to_its_terms_raises_an_error_instead_of_being_added_to_them(function):
    model = nn.Linear(2, 1)

    def losses(*_):
        value = model.weight.sum()
        return {"loss": 2 * value, "loss_a": value, "loss_b": value}

    step = accelerate(model, torch.optim.SGD(model.parameters(), 0.1), speed=None, **{function: losses})
    with pytest.raises(
        LossError, match=r"'loss' and \['loss_a', 'loss_b'\], and all of them would be summed"
    ):
        step((torch.ones(1, 2), torch.ones(1, 1)))
