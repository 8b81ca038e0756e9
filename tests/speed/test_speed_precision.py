"""Tests of `precision`: option values, the TF32 context, and float8 (with a mock of torchao, except on a GPU)."""

import copy
import sys
import types

import pytest
import torch
from torch import nn

from accelerators import cuda_only
from slipstream import accelerate
from slipstream.errors import ConfigError
from slipstream.speed.precision import convert_to_fp8, read_precision, tf32


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bf61", "did you mean 'bf16'"),
        (16, "not 16"),
        (True, "not True"),
        (dict(name="bf16"), "not {'name'"),
    ],
)
def test_invalid_value_error_contains_the_config_path(value, message):
    with pytest.raises(ConfigError, match=f"^precision: .*{message}"):
        read_precision(value)


def switches():
    cudnn = torch.backends.cudnn
    return [b.fp32_precision for b in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]


def test_tf32_is_restored_after_its_context():
    before = switches()
    with tf32():
        assert switches() == ["tf32"] * 3
    assert switches() == before


NARROW = [
    (lambda: nn.Conv1d(16, 8, 5, stride=2, padding=2), (1,)),
    (lambda: nn.Conv2d(16, 8, 3, stride=2, padding=1), (6, 1)),
    (lambda: nn.Conv2d(16, 8, 5, stride=3, padding=2), (5, 2)),
    (lambda: nn.Conv3d(16, 8, 3, padding=1), (1, 6, 6)),
]


@pytest.mark.parametrize(("layer", "size"), NARROW)
@pytest.mark.parametrize("compile", [None, dict(backend="aot_eager", scope="step")])
def test_bf16_gradients_of_narrow_images_on_a_cpu_are_those_of_float64(layer, size, compile):
    torch.manual_seed(0)
    net, image = layer(), torch.randn(4, 16, *size)
    weights = net.weight.detach().clone()
    exact = copy.deepcopy(net).double()
    speed = dict(precision="bf16", **({} if compile is None else dict(compile=compile)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step = accelerate(net, optimizer, lambda out, target: (out * target).sum(), speed)
    target = torch.randn(exact(image.double()).shape)
    (exact(image.double()) * target.double()).sum().backward()
    for _ in range(4):
        junk = [
            torch.full((2**k,), torch.nan) for k in range(4, 18)
        ]  # memory that an incorrect kernel may read
        del junk
        with torch.no_grad():
            net.weight.copy_(weights)
        step((image, target))
        error = (weights - net.weight).double() - exact.weight.grad
        assert error.norm() < 0.02 * exact.weight.grad.norm()


# ---- float8 ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 64)
        self.head = nn.Linear(64, 10)
        self.attention = nn.MultiheadAttention(16, 2)  # reads its output layer's weight directly
        self.conv = nn.Conv2d(16, 16, 1)


@pytest.fixture
def hopper(monkeypatch):
    """Mock an H100 and torchao. The conversion only records the names of the converted modules."""
    converted = []

    def convert(module, *, module_filter_fn, config):
        converted.extend(name for name, m in module.named_modules() if module_filter_fn(m, name))
        assert config.pad_inner_dim

    torchao = types.ModuleType("torchao")
    torchao.float8 = types.ModuleType("torchao.float8")
    torchao.float8.convert_to_float8_training = convert
    torchao.float8.Float8LinearConfig = lambda **options: types.SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "torchao", torchao)
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao.float8)
    return converted


def test_linear_layers_with_valid_sizes_are_converted(hopper):
    assert convert_to_fp8(Block()) == 1
    assert hopper == ["wide"]


def test_model_without_convertible_layers_raises_an_error(hopper):
    with pytest.raises(ConfigError, match=r"precision: .*Sequential has no nn\.Linear .* multiples of 16"):
        convert_to_fp8(nn.Sequential(nn.Conv2d(16, 16, 3), nn.Linear(16, 10)))


@pytest.mark.gpu
@cuda_only
def test_float8_training_follows_float32_on_the_gpu():
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("requires compute capability 8.9")

    def losses(fp8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
        names = list(model.state_dict())
        if fp8:
            assert convert_to_fp8(model) == 2
            assert list(model.state_dict()) == names
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(50, 64, device="cuda")  # 50 is not a multiple of 16
        found = []
        for _ in range(20):
            with torch.autocast("cuda", torch.bfloat16, enabled=fp8):
                loss = (model(x).float() - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    torch.testing.assert_close(losses(True), losses(False), rtol=0.05, atol=0.01)
