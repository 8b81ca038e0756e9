"""Tests of RMSpropTF and BertAdam (compared with float64 loops), optimizers from pytorch_optimizer, and Muon."""

import copy
import math

import pytest
import torch
from torch import nn

from slipstream.optim import BertAdam, RMSpropTF

SHAPES = [(4, 3), (5,), (2, 2, 2)]


def make_start():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(steps=7):
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(steps)
    ]


def advance(optimizer, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def run(kind, grads, dtype=torch.float64, **options):
    params = [nn.Parameter(p.to(dtype)) for p in make_start()]
    advance(kind(params, **options), params, grads)
    return [p.detach() for p in params]


def assert_same(ours, expected, **tolerance):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance)


# ---- RMSpropTF ---------------------------------------------------------------------------------------


def rmsprop_tf(
    grads,
    lr=1e-2,
    alpha=0.9,
    eps=1e-10,
    weight_decay=0.0,
    momentum=0.0,
    centered=False,
    decoupled_decay=False,
    lr_in_momentum=True,
):
    params = make_start()
    for i, p in enumerate(params):
        square, mean, buffer = torch.ones_like(p), torch.zeros_like(p), torch.zeros_like(p)
        for step in grads:
            g = step[i]
            if decoupled_decay:
                p = p * (1 - weight_decay)
            else:
                g = g + weight_decay * p
            square = alpha * square + (1 - alpha) * g**2
            mean = alpha * mean + (1 - alpha) * g
            u = g / (square - (mean**2 if centered else 0) + eps).sqrt()
            if momentum == 0:
                p = p - lr * u
            elif lr_in_momentum:
                buffer = momentum * buffer + lr * u
                p = p - buffer
            else:
                buffer = momentum * buffer + u
                p = p - lr * buffer
        params[i] = p
    return params


RMS = [
    {},
    {"alpha": 0.7, "eps": 1e-2, "lr": 0.1},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_decay": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "lr_in_momentum": False},
    {"centered": True, "momentum": 0.5, "weight_decay": 0.01},
]


@pytest.mark.parametrize("options", RMS)
def test_rmsprop_tf_matches_its_formula(options):
    assert_same(
        run(RMSpropTF, gradients(), **options), rmsprop_tf(gradients(), **options), rtol=1e-10, atol=1e-12
    )
    ours = run(RMSpropTF, gradients(), torch.float32, **options)
    assert_same(ours, rmsprop_tf(gradients(), **options), rtol=1e-4, atol=1e-5)


# ---- BertAdam ----------------------------------------------------------------------------------------

AFTER_WARMUP = {
    "warmup_linear": lambda x, w: max((x - 1) / (w - 1), 0),
    "warmup_constant": lambda x, w: 1,
    "warmup_cosine": lambda x, w: (1 + math.cos(math.pi * x)) / 2,
    "warmup_poly": lambda x, w: max(1 - x, 0) ** 0.5,
}


def bert_adam(
    grads,
    lr=0.01,
    warmup=-1,
    t_total=-1,
    schedule="warmup_linear",
    b1=0.9,
    b2=0.999,
    e=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
):
    params = make_start()
    m, v = [0.0] * len(params), [0.0] * len(params)
    for t, step in enumerate(grads):
        norm = math.sqrt(sum(float((g**2).sum()) for g in step))
        shrink = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm > 0 else 1.0
        factor = 1.0
        if t_total != -1:
            x = t / t_total
            factor = x / warmup if x < warmup else AFTER_WARMUP[schedule](x, warmup)
        for i, g in enumerate(g * shrink for g in step):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            params[i] = params[i] - lr * factor * (m[i] / (v[i].sqrt() + e) + weight_decay * params[i])
    return params


BERT = [
    {},
    {"max_grad_norm": -1},
    {"weight_decay": 0.0, "b1": 0.5, "b2": 0.8, "e": 1e-2},
    *({"t_total": 6, "warmup": 0.4, "schedule": schedule} for schedule in AFTER_WARMUP),
    {"t_total": 10},
    {"t_total": 4, "schedule": "warmup_poly"},  # more steps than t_total
]


@pytest.mark.parametrize("options", BERT)
def test_bert_adam_matches_its_formula(options):
    options = {"lr": 0.01, **options}
    assert_same(
        run(BertAdam, gradients(), **options), bert_adam(gradients(), **options), rtol=1e-10, atol=1e-12
    )
    ours = run(BertAdam, gradients(), torch.float32, **options)
    assert_same(ours, bert_adam(gradients(), **options), rtol=1e-4, atol=1e-5)


# ---- both optimizers ----------------------------------------------------------------------------------

BOTH = [(RMSpropTF, {"momentum": 0.9, "centered": True}), (BertAdam, {"t_total": 9, "warmup": 0.3})]


@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_resumed_run_is_bitwise_equal(kind, options):
    params = [nn.Parameter(p) for p in make_start()]
    first = kind(params, lr=0.01, **options)
    advance(first, params, gradients()[:4])
    again = [nn.Parameter(p.detach().clone()) for p in params]
    second = kind(again, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    advance(first, params, gradients()[4:])
    advance(second, again, gradients()[4:])
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_parameters_with_gradients_are_updated_in_all_dtypes_and_groups(kind, options):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    still, slow = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = kind([{"params": [a, b, still]}, {"params": [slow], "lr": 0.0}], lr=0.1, **options)
    for _ in range(2):
        for p in (a, b, slow):
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
    assert (a < 1).all()
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=0)
    assert torch.equal(still, torch.ones(2))
    assert torch.equal(slow, torch.ones(2))


# ---- names in configurations ----------------------------------------------------------------------
