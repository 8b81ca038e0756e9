"""Small steps on the CPU are called through C++ code, with the numbers of a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate
from slipstream.speed import graph_step, small_steps
from slipstream.step.captured import DirectCalls


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch, tmp_path):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def log(monkeypatch):
    """Record whether graphs are compiled with the C++ wrapper, and the reasons if they are not."""
    found, compile_step, compile_cpp = [], graph_step.compile_step, small_steps._compile

    def recorded(*args):
        run = compile_cpp(*args)
        found.append("C++")
        return run

    monkeypatch.setattr(small_steps, "_compile", recorded)
    monkeypatch.setattr(
        graph_step, "compile_step", lambda backend, _, *args: compile_step(backend, found.append, *args)
    )
    return found


@pytest.fixture
def direct(monkeypatch):
    """Record, for each lookup, whether a direct call was found."""
    found, find = [], DirectCalls.find

    def searching(*args):
        call = find(*args)
        found.append(call is not None)
        return call

    monkeypatch.setattr(DirectCalls, "find", searching)
    return found


def conv_net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 4))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.ReLU(), nn.Linear(8, 4))


def batches(count=8, size=6):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, size, 3, 6, 6, generator=generator)
    return list(zip(inputs, torch.randint(0, 4, (count, size), generator=generator), strict=True))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def run(net, make_optimizer, data, **speed):
    torch.manual_seed(2)
    step = accelerate(net, make_optimizer(net), F.cross_entropy, speed=speed)
    return step, torch.stack([step(batch)["loss"] for batch in data])


STEP = {"scope": "step", "cache": False}


@pytest.mark.parametrize(
    ("make_net", "make_optimizer", "options"),
    [
        (conv_net, sgd, {}),
        (
            mlp,
            lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3),
            {"accumulate": 2, "clip_grad": {"max_norm": 1.0}, "ema": {"type": "constant", "decay": 0.9}},
        ),
        (mlp, sgd, {"precision": "bf16", "nan_guard": "skip"}),
    ],
    ids=["dropout and BatchNorm", "accumulation, clipping and EMA", "bf16 and nan_guard"],
)
def test_numbers_are_those_of_the_eager_step(log, direct, make_net, make_optimizer, options):
    net, other = make_net(), make_net()
    _, losses = run(net, make_optimizer, batches(), compile=STEP, **options)
    _, expected = run(other, make_optimizer, batches(), **options)
    tolerance = 1e-2 if "precision" in options else 1e-5
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=tolerance, atol=tolerance)
    assert set(log) == {"C++"}
    assert any(direct)
    assert not losses.requires_grad
    assert torch.is_grad_enabled()
    assert torch._C._get_mkldnn_enabled()


def test_changes_of_classes_modes_and_modules_are_noticed(log, direct):
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    def change(net, number):
        if number == 4:
            Scaled.scale = 0.5
        elif number == 5:
            net[2].eval()
        elif number == 6:
            torch.manual_seed(3)
            net[3].load_state_dict(nn.Linear(8, 4).state_dict())

    found = []
    for compile_options in (STEP, False):
        torch.manual_seed(0)
        Scaled.scale, losses = 1.0, []
        net = nn.Sequential(nn.Flatten(), Scaled(108, 8), nn.Dropout(0.3), nn.Linear(8, 4))
        step = accelerate(net, sgd(net), F.cross_entropy, speed={"compile": compile_options})
        for number, batch in enumerate(batches()):
            change(net, number)
            losses.append(step(batch)["loss"])
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert set(log) == {"C++"}
    assert direct[:4] == [False, False, True, False]


@pytest.mark.slow
def test_large_operators_are_called_from_python(log):
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 4))
    run(net, sgd, batches(3, size=512), compile=STEP)
    assert log == []


def test_graph_without_cpp_code_is_called_from_python(monkeypatch, log):
    def fail(*_):
        raise NotImplementedError("not supported\nmore")

    monkeypatch.setattr(small_steps, "_compile", fail)
    net, other = mlp(), mlp()
    _, losses = run(net, sgd, batches(4), compile=STEP)
    torch.testing.assert_close(losses, run(other, sgd, batches(4))[1], rtol=1e-5, atol=1e-6)
    assert len(log) == 1
    assert log[0].endswith("(NotImplementedError: not supported)")


@pytest.mark.slow
def test_two_steps_in_a_process_have_static_shapes(log, direct):
    for net in (mlp(), conv_net()):
        run(net, sgd, batches(5), compile=STEP)
    assert log == ["C++", "C++"]
    assert direct == [False, False, True, True] * 2
