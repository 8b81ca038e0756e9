"""Test that `accelerate` moves the model to an NPU and trains it like a plain loop on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from npu_runs import STEPS, adamw, assert_equal_on_the_host, batches, by_hand, net, sgd
from torch import nn

from slipstream import accelerate, feed
from slipstream.optim import npu

ONE_GRAPH = dict(scope="step", backend="aot_eager", cache=False)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("speed", [{}, dict(compile=ONE_GRAPH)], ids=["eager", "compiled"])
def test_model_moved_after_its_optimizer_was_built_is_trained(make_optimizer, speed):
    model = net()
    params = list(model.parameters())
    step = accelerate(model, make_optimizer(model.parameters()), F.cross_entropy, speed=speed)
    for batch in feed(batches(), prefetch=2):
        step(batch)
    assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
    assert model[2].weight is model[4].weight
    assert all(param.device == torch.device("npu", 0) for param in params)
    assert_equal_on_the_host(model, by_hand(make_optimizer, batches()))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("speed", [{}, dict(compile=ONE_GRAPH)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        (lambda params: npu.NpuFusedSGD(params, lr=0.1, momentum=0.9), sgd),
        (lambda params: npu.NpuFusedAdamW(params, lr=0.01, eps=1e-3), adamw),
    ],
    ids=["SGD", "AdamW"],
)
def test_fused_optimizers_with_one_gradient_buffer_match_a_plain_loop(fused, plain, speed, window):
    data = batches(STEPS - 1)
    model = net().to("npu")
    optimizer = fused(model.parameters())
    step = accelerate(model, optimizer, F.cross_entropy, speed=dict(speed, accumulate=window))
    for batch in data:
        step(batch)
    if speed:
        assert step.inner._captured.verified == {True, window == 1}
    assert_equal_on_the_host(model, by_hand(plain, data, window))


def test_inductor_without_a_code_generator_for_the_device_is_reported(caplog):
    model = net()
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, speed=dict(compile=True))
    for batch in batches():
        step(batch)
    assert "inductor has no code generator for npu" in caplog.text
    assert step.compiled_scope is None
    assert_equal_on_the_host(model, by_hand(sgd, batches()))


def test_lazy_parameters_are_created_on_the_device():
    model = nn.Sequential(nn.LazyLinear(3))
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, speed={})
    step(batches()[0])
    before = model[0].weight.detach().clone()
    step(batches()[1])
    assert before.device == torch.device("npu", 0)
    assert not torch.equal(before, model[0].weight)
