"""channels_last does not change results, and weights keep their memory format."""

import pytest
import torch
from torch import nn

from slipstream import accelerate
from slipstream.optim.kernels import lay_out_states
from slipstream.speed.memory_format import to_channels_last

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 4, 2),
        )
        self.head = nn.Linear(4, 2)
        self.positions = nn.Parameter(torch.zeros(1, 3, 8, 8))
        self.formats = []

    def forward(self, inputs, mode="loss"):
        if not torch.compiler.is_compiling():
            self.formats.append(inputs["image"].is_contiguous(memory_format=LAST))
        y = self.body(inputs["image"].float() + self.positions)
        return self.head(y.mean((2, 3))).square().mean()


def batches(count=20, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [{"image": torch.randn(2, 3, 8, 8, generator=generator)} for _ in range(count)]


def laid_out():
    model = Net()
    to_channels_last(model)
    return model


def train(model, optimizer=None, data=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in data or batches():
        loss = model(batch, mode="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), optimizer


def assert_close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def assert_convolutions_are_last(model):
    for index in (0, 4):
        weight = model.body[index].weight
        assert weight.is_contiguous(memory_format=LAST)
        assert not weight.is_contiguous()


def test_20_steps_match_contiguous_training_and_keep_the_format():
    model, usual = laid_out(), Net()
    parameters = [id(p) for p in model.parameters()]
    to_channels_last(model)
    losses, optimizer = train(model)
    expected, _ = train(usual)
    assert_close(losses, expected)
    assert_close(model.state_dict(), usual.state_dict())
    assert [id(p) for p in model.parameters()] == parameters
    assert_convolutions_are_last(model)
    for index in (0, 4):
        weight = model.body[index].weight
        assert weight.grad.stride() == weight.stride()
        assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    assert model.positions.is_contiguous()  # only convolution weights are converted


def test_compiled_step_with_channels_last_matches_eager():
    model = laid_out()
    model.compile(backend="aot_eager", fullgraph=True)
    assert_close(train(model, data=batches(5))[0], train(Net(), data=batches(5))[0])


@pytest.mark.parametrize("writes_last", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_checkpoint_in_the_other_format_resumes_with_the_same_results(kind, fused, writes_last, tmp_path):
    def optimizer(model):
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return kind(model.parameters(), lr=0.01, fused=fused, **momentum)

    writer, reader = (laid_out(), Net()) if writes_last else (Net(), laid_out())
    first = optimizer(writer)
    train(writer, first, batches(5))
    torch.save({"model": writer.state_dict(), "optimizer": first.state_dict()}, tmp_path / "c.pth")
    saved = torch.load(tmp_path / "c.pth", weights_only=True)
    second = optimizer(reader)
    reader.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    lay_out_states(second)
    if not writes_last:
        assert_convolutions_are_last(reader)
    for param, states in second.state.items():
        assert {value.stride() for value in states.values() if value.shape == param.shape} == {param.stride()}
    more = batches(5, seed=2)
    assert_close(train(reader, second, more)[0], train(writer, first, more)[0])
    assert_close(reader.state_dict(), writer.state_dict())


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x):
        x.mul_(0.5)
        return self.conv(x).mean((2, 3))


COMPILED = [None, {"backend": "aot_eager"}, {"backend": "aot_eager", "scope": "model"}]


@pytest.mark.parametrize("compile", COMPILED)
def test_a_change_of_the_batch_in_place_is_visible_to_the_loss_and_the_user(compile):
    def loss(model, batch):
        return model(batch).square().mean() + batch.mean()

    x, model, reference = torch.ones(2, 3, 5, 5), ChangesItsInput(), ChangesItsInput().double()
    y, optimizer = x.double(), torch.optim.SGD(reference.parameters(), 0.1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = accelerate(model, sgd, compute_loss=loss, speed={"channels_last": True, "compile": compile})
    for _ in range(4):
        optimizer.zero_grad()
        expected = loss(reference, y)
        expected.backward()
        optimizer.step()
        assert_close(step(x)["loss"].double(), expected.detach())
        assert_close(x.double(), y)
    assert_close(model.conv.weight.double(), reference.conv.weight)
    assert "warning" not in step.summary()


@pytest.mark.parametrize("compile", COMPILED[:2])
def test_a_gradient_penalty_may_view_the_gradient_of_the_batch(compile):
    def loss(model, batch):
        batch = batch.clone().requires_grad_()
        outputs = model(batch)
        (gradient,) = torch.autograd.grad(outputs.sum(), batch, create_graph=True)
        return outputs.mean() + gradient.view(len(batch), -1).norm(dim=1).sub(1).square().mean()

    results = []
    for speed in ({}, {"channels_last": True, "compile": compile}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 1, 3))
        step = accelerate(model, torch.optim.SGD(model.parameters(), 0.1), compute_loss=loss, speed=speed)
        results.append([step(x["image"])["loss"] for x in batches(4)])
    assert_close(*results)
