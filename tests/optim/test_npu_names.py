"""The NpuFused* names: torch_npu's classes where it is installed, stand-ins or clear errors elsewhere."""

import logging
import sys
import types

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.optim import npu
from slipstream.registry import OPTIMIZERS

SAME = ["Adadelta", "Adam", "AdamW", "RMSprop", "SGD"]
OTHER = ["AdamP", "BertAdam", "Lamb", "RMSpropTF"]


@pytest.fixture(autouse=True)
def without_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # import raises ModuleNotFoundError


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
def test_every_name_is_registered_and_importable(name):
    assert OPTIMIZERS.get(f"NpuFused{name}") is getattr(npu, f"NpuFused{name}")


@pytest.mark.parametrize("name", SAME + OTHER)
def test_with_torch_npu_its_class_is_used(name, torch_npu, caplog):
    optimizer = build(name, strict_npu=True, weight_decay=0.5)
    assert type(optimizer) is getattr(torch_npu, f"NpuFused{name}")
    assert optimizer.defaults["weight_decay"] == 0.5
    assert not caplog.records


@pytest.mark.parametrize("name", SAME)
def test_elsewhere_torchs_class_of_the_same_maths_stands_in_and_one_line_says_so(name, caplog):
    with caplog.at_level(logging.WARNING, "slipstream"):
        optimizer = build(name, weight_decay=0.5)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.defaults["weight_decay"] == 0.5
    (record,) = caplog.records
    assert f"NpuFused{name}" in record.getMessage()
    assert f"torch.optim.{name} stands in" in record.getMessage()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("form", ["list", "iterator", "groups", "named"])
def test_the_stand_in_is_fused_where_the_device_can(name, form):
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


def test_the_stand_in_is_not_fused_where_it_cannot_be_or_another_way_was_asked_for():
    assert build("SGD", [torch.zeros(2, device="meta", requires_grad=True)]).defaults["fused"] is None
    assert build("SGD", [parameter(torch.complex64)]).defaults["fused"] is None
    assert build("SGD", foreach=True).defaults["foreach"] is True
    assert build("SGD", fused=False).defaults["fused"] is False


@pytest.mark.parametrize("name", OTHER)
def test_where_torch_has_no_such_maths_the_error_names_the_remedy(name):
    with pytest.raises(ConfigError, match=rf"NpuFused{name} needs torch_npu.*install it on Ascend, or take"):
        build(name)


def test_strict_npu_refuses_the_stand_in():
    with pytest.raises(ConfigError, match=r"install it on Ascend, or take AdamW or leave out strict_npu"):
        build("AdamW", strict_npu=True)


def test_a_torch_npu_without_the_class_says_so(torch_npu, caplog):
    del torch_npu.NpuFusedSGD
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert type(build("SGD")) is torch.optim.SGD
    assert "torch_npu.optim has no NpuFusedSGD" in caplog.text
