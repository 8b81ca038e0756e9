"""Tests of mmcv's operators with bfloat16 tensors, with stand-ins and, if mmcv is installed, with its operators."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd import Function

from slipstream.openmmlab.operators import compute_bf16_operators_in_float32

SHIMS = Path(__file__).parent / "shims"


@pytest.fixture
def scale(monkeypatch):
    """A stand-in for an operator: `scale(x, factor)` returns x * factor and an integer, and rejects bfloat16."""

    class ScaleFunction(Function):
        @staticmethod
        def forward(ctx, x, factor):
            assert x.dtype == factor.dtype, "expected scalar type Float but found BFloat16"
            assert x.dtype != torch.bfloat16, "not implemented for BFloat16"
            ctx.save_for_backward(x, factor)
            return x * factor, torch.tensor(3)

        @staticmethod
        def backward(ctx, grad, _):
            assert grad.dtype != torch.bfloat16, "not implemented for BFloat16"
            x, factor = ctx.saved_tensors
            return grad * factor, (grad * x).sum()

    module = ModuleType("mmcv.ops.scale")
    ScaleFunction.__module__ = module.__name__
    module.ScaleFunction = ScaleFunction
    monkeypatch.setitem(sys.modules, module.__name__, module)
    compute_bf16_operators_in_float32()
    compute_bf16_operators_in_float32()  # the second call has no effect
    return ScaleFunction.apply


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_arguments_are_computed_in_float32(scale, autocast):
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    factor = torch.tensor(1.5, requires_grad=True)
    with torch.autocast("cpu", enabled=autocast):
        y, index = scale(x, factor)
    assert (y.dtype, y.tolist(), index.item()) == (torch.bfloat16, [1.5, 3.0, 4.5], 3)
    y.sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.bfloat16, [1.5, 1.5, 1.5])
    assert (factor.grad.dtype, factor.grad.item()) == (torch.float32, 6.0)


_ROI_ALIGN = """
import slipstream.openmmlab, torch
from mmcv.ops import roi_align
from slipstream.openmmlab.operators import compute_bf16_operators_in_float32
compute_bf16_operators_in_float32()
def run(dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 8).bfloat16().to(dtype).requires_grad_()
    y = roi_align(x, torch.tensor([[0, 1.0, 1.0, 6.0, 5.0]]).to(dtype), (3, 3))
    y.sum().backward()
    return y, x.grad
for low, full in zip(run(torch.bfloat16), run(torch.float32)):
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), full, rtol=1e-2, atol=1e-2)
"""


def test_roi_align_of_mmcv_accepts_bf16(tmp_path):
    spec = importlib.util.find_spec("mmcv")
    if spec is None or not list(Path(spec.origin).parent.glob("_ext*")):
        pytest.skip("requires mmcv with its compiled operators")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SHIMS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", _ROI_ALIGN], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
