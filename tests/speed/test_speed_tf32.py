"""Test that both torch interfaces for TF32 are readable inside the `tf32` context and restored after it."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from slipstream.speed.precision import tf32

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
{before}
on_cpu = torch.backends.mkldnn.matmul.fp32_precision
settings = lambda: (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
outside = settings()
with tf32():
    assert settings() == ("tf32", "tf32", "tf32"), settings()
    assert torch.backends.mkldnn.matmul.fp32_precision == on_cpu
    {inside}
assert settings() == outside
assert torch.backends.mkldnn.matmul.fp32_precision == on_cpu
{after}
"""


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("", "assert torch.get_float32_matmul_precision() == 'high'", "assert not matmul.allow_tf32"),
        (
            "torch.set_float32_matmul_precision('medium'); cudnn.allow_tf32 = False",
            "assert matmul.allow_tf32 and cudnn.allow_tf32",
            "assert torch.get_float32_matmul_precision() == 'medium' and not cudnn.allow_tf32",
        ),
        (
            "matmul.fp32_precision = 'tf32'; cudnn.conv.fp32_precision = 'ieee'",
            "",
            "assert settings() == outside",
        ),
    ],
    ids=["defaults", "older interface", "newer interface"],
)
def test_both_torch_interfaces_are_readable_and_restored(before, inside, after):
    code = SCRIPT.format(before=before, inside=inside or "pass", after=after)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
