"""Test that `accelerate` moves the model to an NPU and trains it like a plain loop on the CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from npu_runs import STEPS, adamw, assert_equal_on_the_host, batches, by_hand, net, sgd
from torch import nn

from slipstream import accelerate, feed
from slipstream.errors import ModelError
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


def test_optimizer_state_is_moved_with_the_model():
    data, model = batches(), net()
    optimizer = sgd(model.parameters())
    for inputs, targets in data[:4]:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    step = accelerate(model, optimizer, F.cross_entropy, speed={})
    for batch in data[4:]:
        step(batch)
    assert_equal_on_the_host(model, by_hand(sgd, data))


def test_parameters_that_cannot_be_moved_in_place_raise_an_error():
    model = net()
    loss = F.cross_entropy(model(batches()[0][0]), batches()[0][1])
    with pytest.raises(ModelError, match=r"model\.to\('npu:0'\) before you build the optimizer"):
        accelerate(model, sgd(model.parameters()), F.cross_entropy, speed={})
    assert loss.requires_grad


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


def test_graph_adds_user_gradients_to_the_buffer():
    def make_optimizer(params):
        return npu.NpuFusedSGD(params, lr=0.1)

    found = []
    for speed in ({}, dict(compile=ONE_GRAPH)):
        model = net().to("npu")
        step = accelerate(model, make_optimizer(model.parameters()), F.cross_entropy, speed=speed)
        for number, batch in enumerate(batches()):
            if number > 4:
                model[1].weight.grad += 1.0
            step(batch)
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "npu")])
@pytest.mark.parametrize("speed", [{}, dict(compile=ONE_GRAPH)], ids=["eager", "compiled"])
def test_moving_the_model_after_accelerate_raises_an_error(speed, devices):
    model = net()
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, speed=speed)
    data = batches()
    for batch in data[:5]:
        step(batch)
    for device in devices:
        model.to(device)
    message = r"'0.weight' was replaced.*parameters of models on npu; move a copy.*copy.deepcopy\(model\)"
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            step(data[5])


@pytest.mark.parametrize("speed", [{}, dict(compile=ONE_GRAPH)], ids=["eager", "compiled"])
def test_copy_of_the_model_may_be_moved_after_accelerate(speed):
    model = net()
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, speed=speed)
    for batch in batches():
        step(batch)
        assert copy.deepcopy(model).to("cpu")[1].weight.device.type == "cpu"
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


def test_part_of_the_model_moved_after_the_optimizer_was_built_raises_an_error():
    model = net()
    optimizer = sgd(model.parameters())
    model[5].to("npu")
    with pytest.raises(
        ModelError,
        match=r"of shape \(3, 8\) on cpu, but the model is on npu:0\. If part of the model was moved",
    ):
        accelerate(model, optimizer, F.cross_entropy, speed={})


@pytest.mark.parametrize("speed", [{}, dict(compile=ONE_GRAPH)], ids=["eager", "compiled"])
def test_loss_module_is_moved_with_the_model(speed):
    weight = torch.tensor([1.0, 2.0, 3.0])
    model, expected = net(), net()
    step = accelerate(model, sgd(model.parameters()), nn.CrossEntropyLoss(weight), speed=speed)
    optimizer = sgd(expected.parameters())
    for inputs, targets in batches():
        step((inputs.to("npu"), targets.to("npu")))
        F.cross_entropy(expected(inputs), targets, weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_the_host(model, expected.state_dict())


def test_compiled_nadam_matches_a_plain_loop():
    def nadam(params):
        return torch.optim.NAdam(params, lr=0.01, eps=1e-3)

    model = net()
    step = accelerate(model, nadam(model.parameters()), F.cross_entropy, speed=dict(compile=ONE_GRAPH))
    for batch in batches():
        step(batch)
    assert step._step.uses_graph
    assert_equal_on_the_host(model, by_hand(nadam, batches()), atol=1e-5)


def test_batches_before_a_loader_error_are_returned():
    def loader():
        yield from batches()[:5]
        raise OSError("broken")

    found = []
    with pytest.raises(OSError, match="broken"):
        found.extend(inputs.cpu() for inputs, _ in feed(loader(), prefetch=2))
    assert len(found) == 5


def test_expanded_tensors_are_copied_ahead():
    x = torch.randn(1, 4).expand(6, 4)
    (found,) = feed([x], prefetch=2)
    assert torch.equal(found.cpu(), x)


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
