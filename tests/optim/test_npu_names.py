"""Test that the NpuFused* names create torch_npu's optimizers if it is installed, and equivalent optimizers otherwise.

Lamb and AdamP are compared with float64 implementations of their papers (Lamb: You et al. 2020, third version; AdamP:
Heo et al. 2021). Where a paper leaves details open, the implementations follow torch_npu.
"""

import math
import sys
import types

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.optim import npu
from slipstream.registry import OPTIMIZERS

SAME = ["Adadelta", "Adam", "AdamW", "RMSprop", "SGD"]
OURS = ["BertAdam", "RMSpropTF"]
LIBRARY = ["AdamP", "Lamb"]
OTHER = OURS + LIBRARY


@pytest.fixture(autouse=True)
def without_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # makes the import raise ModuleNotFoundError


@pytest.fixture
def torch_npu(monkeypatch):
    def fused(name):
        return type(name, (torch.optim.SGD,), {})

    optim = types.SimpleNamespace(**{f"NpuFused{name}": fused(f"NpuFused{name}") for name in SAME + OTHER})
    module = types.ModuleType("torch_npu")
    module.optim = optim
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return optim


def parameter(dtype=torch.float32):
    return torch.zeros(2, dtype=dtype, requires_grad=True)


def build(name, params=None, **kwargs):
    params = [parameter()] if params is None else params
    return OPTIMIZERS.build({"type": f"NpuFused{name}", "lr": 0.1, **kwargs}, default_args={"params": params})


@pytest.mark.parametrize("name", SAME + OTHER)
def test_all_names_are_registered_and_importable(name):
    assert OPTIMIZERS.get(f"NpuFused{name}") is getattr(npu, f"NpuFused{name}")


@pytest.mark.parametrize("name", SAME + OTHER)
def test_torch_npu_class_is_used_if_installed(name, torch_npu, capsys):
    optimizer = build(name, strict_npu=True, weight_decay=0.5)
    assert type(optimizer) is getattr(torch_npu, f"NpuFused{name}")
    assert optimizer.defaults["weight_decay"] == 0.5
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", SAME)
def test_torch_class_is_used_and_logged_if_torch_npu_is_missing(name, capsys):
    optimizer = build(name, weight_decay=0.5)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.defaults["weight_decay"] == 0.5
    (line,) = capsys.readouterr().err.splitlines()
    assert f"NpuFused{name}" in line
    assert f"using torch.optim.{name} instead" in line


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("form", ["list", "iterator", "groups", "named"])
def test_substitute_is_fused_if_the_device_supports_it(name, form):
    p, q = parameter(), parameter()
    params = {
        "list": [p, q],
        "iterator": iter([p, q]),
        "groups": [{"params": [p]}, {"params": q, "lr": 0.5}],
        "named": [("p", p), ("q", q)],
    }[form]
    optimizer = build(name, params)
    assert optimizer.defaults["fused"] is True
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert (p < 0).all()


@pytest.mark.parametrize("name", LIBRARY)
def test_pytorch_optimizer_is_used_for_the_other_names(name, capsys):
    library = pytest.importorskip("pytorch_optimizer")
    assert type(build(name)) is getattr(library, name)
    assert f"using pytorch_optimizer.{name} instead" in capsys.readouterr().err


@pytest.mark.parametrize("name", LIBRARY)
def test_missing_library_error_names_the_extra_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=rf"NpuFused{name} requires torch_npu.*'slipstream\[optimizers\]'"):
        build(name)


# ---- formulas of the library's optimizers ------------------------------------------------------------------


def gradients(steps, shapes, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return [
        [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for _ in range(steps)
    ]


def run(name, start, grads, **options):
    """Return the parameters after the optimizer steps, in float64."""
    params = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = build(name, params, **options)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def lamb(start, grads, lr, betas, eps, weight_decay, adam=False, use_global_grad_norm=False):
    params = [p.clone() for p in start]
    m = [torch.zeros_like(p) for p in params]
    v = [torch.zeros_like(p) for p in params]
    for step in grads:
        norm = math.sqrt(sum(float((g**2).sum()) for g in step))
        shrink = max(norm, 1.0) if use_global_grad_norm else 1.0
        for i, g in enumerate(g / shrink for g in step):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            update = m[i] / (v[i].sqrt() + eps) + weight_decay * params[i]
            ratio = min(float(params[i].norm()), 10.0) / float(update.norm())
            params[i] = params[i] - lr * (1.0 if adam or ratio == 0 else ratio) * update
    return params


@pytest.mark.parametrize("options", [{}, {"adam": True}, {"use_global_grad_norm": True}])
def test_lamb_matches_the_paper(options):
    pytest.importorskip("pytorch_optimizer")
    # The norm of the first tensor exceeds 10, the limit in the trust ratio.
    start = [torch.full((4, 3), 9.0), torch.linspace(-1, 1, 5), torch.zeros(2)]
    start = [p.double() for p in start]
    grads = gradients(6, [p.shape for p in start], scale=2.0)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, **options}
    for ours, expected in zip(
        run("Lamb", start, grads, **options), lamb(start, grads, **options), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-6)
