"""Test the correction of inductor's code for additions to memory, which would corrupt memory without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

SCRIPT = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
from slipstream import accelerate

torch.set_num_threads(2)  # with one thread, inductor generates different code


class Merging(nn.Module):
    '''Swin's patch merging as in mmpretrain: unfold's gradient adds to memory in a loop with two tiled dimensions.'''

    def __init__(self, channels):
        super().__init__()
        self.embed = nn.Linear(8, channels)
        self.norm = nn.LayerNorm(channels)
        self.merged_norm = nn.LayerNorm(4 * channels)
        self.reduce = nn.Linear(4 * channels, 8)

    def forward(self, x):
        x = self.norm(self.embed(x))
        x = x.view(4, 14, 14, -1).permute(0, 3, 1, 2)
        return self.reduce(self.merged_norm(F.unfold(x, 2, stride=2).transpose(1, 2)))


torch.manual_seed(0)
model = Merging(24).requires_grad_(True)
expected = copy.deepcopy(model).double()
batches = [(torch.randn(4, 196, 8), torch.randn(4, 49, 8)) for _ in range(4)]
optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
for x, y in batches:
    optimizer.zero_grad()
    F.mse_loss(expected(x.double()), y.double()).backward()
    optimizer.step()
compile = dict(scope="step", verify=False)
step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, speed=dict(compile=compile))
for batch in batches:
    step(batch)
assert "3 of them with the graph" in step.summary(), step.summary()
for weight, wide in zip(model.parameters(), expected.parameters(), strict=True):
    torch.testing.assert_close(weight.double(), wide, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.slow
def test_gradients_of_unfold_in_a_tiled_loop_are_correct(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SRC), "SLIPSTREAM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
