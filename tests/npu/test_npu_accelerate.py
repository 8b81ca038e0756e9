"""Test that `accelerate` moves the model to an NPU and trains it like a plain loop on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from npu_runs import STEPS, adamw, assert_equal_on_the_host, batches, by_hand, net, sgd
from torch import nn

from slipstream import accelerate, feed
from slipstream.model import ExponentialMovingAverage
from slipstream.optim import npu
from slipstream.step.average import AveragePart

torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)

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
        assert step._step._step.verified == {True, window == 1}
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


def test_model_that_visits_the_cpu_between_batches_is_still_trained():
    """`Module.to` replaces the parameters of models on an NPU, unless a step or a Runner exists."""
    model = net()
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, speed={})
    for number, batch in enumerate(batches()):
        if number == 5:
            model.to("cpu")
            model.to("npu")
        step(batch)
    assert_equal_on_the_host(model, by_hand(sgd, batches()))


def test_parameter_attributes_and_state_dtypes_are_kept():
    model = nn.Linear(4, 2).bfloat16()
    model.weight.no_decay = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((2, 4), 1.001)
    accelerate(model, optimizer, F.cross_entropy, speed={})
    assert model.weight.device.type == "npu"
    assert model.weight.no_decay
    assert optimizer.state[model.weight]["momentum_buffer"].cpu().eq(1.001).all()


def test_compiled_nadam_matches_a_plain_loop():
    def nadam(params):
        return torch.optim.NAdam(params, lr=0.01, eps=1e-3)

    model = net()
    step = accelerate(model, nadam(model.parameters()), F.cross_entropy, speed=dict(compile=ONE_GRAPH))
    for batch in batches():
        step(batch)
    assert step._step.uses_graph
    assert_equal_on_the_host(model, by_hand(nadam, batches()), atol=1e-5)


def test_average_on_the_host_waits_once_per_update():
    model = net().to("npu")
    average = ExponentialMovingAverage(model, momentum=0.5, device="cpu")
    part = AveragePart(average, model, lambda: 0)
    part.before_batch()
    with torch_npu.watching() as seen:
        part.after_batch()
    assert sum(seen.values()) == 1, seen
    start = model[1].weight.detach().cpu().clone()
    model[1].weight.data.add_(1)
    part = AveragePart(average, model, lambda: 1)
    part.before_batch()
    part.after_batch()
    torch.testing.assert_close(average.module[1].weight, start + 0.5)
