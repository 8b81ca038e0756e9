"""Tests on an accelerator: prefetched batches are complete, and bad steps are skipped without host-device syncs."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerators import DEVICE, IS_CUDA, cuda_only, no_waiting
from slipstream.dataset.loading.feed import DeviceFeed, feed
from slipstream.optim import OptimWrapper
from slipstream.speed.nan_guard import SkipNonFinite
from slipstream.speed.precision import tf32
from slipstream.step import EagerStep, sum_losses

pytestmark = pytest.mark.gpu
SLOW = 2048 if IS_CUDA else 64
"""Size of square matrices whose product takes longer than the copy of a batch."""


def images(count=24):
    values = torch.arange(count * 3 * 64 * 64, dtype=torch.int64).remainder(251).to(torch.uint8)
    return TensorDataset(values.view(count, 3, 64, 64), torch.arange(count))


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_are_complete_while_slow_steps_run(pin_memory, prefetch):
    loader = DataLoader(images(), batch_size=2, pin_memory=pin_memory)
    slow = torch.randn(SLOW, SLOW, device=DEVICE)
    sums = []
    for pixels, labels in feed(loader, prefetch=prefetch):
        assert pixels.device.type == DEVICE.type
        assert pixels.dtype == torch.uint8
        for _ in range(10):
            slow = (slow @ slow).tanh()
        # The device reads the batch late, so a copy that reused the batch's memory too early would change the sums.
        sums.append(torch.stack([pixels.long().sum(), labels.sum()]))
    expected = [torch.stack([x.long().sum(), y.sum()]) for x, y in DataLoader(images(), batch_size=2)]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))


def test_host_does_not_synchronize_and_memory_is_bounded():
    loader = DataLoader(images(48), batch_size=4, pin_memory=True)
    batches = DeviceFeed(loader, prefetch=2)
    slow = torch.randn(SLOW, SLOW, device=DEVICE)
    for _ in batches:
        slow = (slow @ slow).tanh()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_reserved()
    with no_waiting():
        for _ in batches:
            slow = (slow @ slow).tanh()
    assert torch.accelerator.memory_reserved() == before


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return {"loss": self.body(x).square().mean()}


@pytest.mark.parametrize(
    "options",
    [dict(fused=True), dict(foreach=True, capturable=True), dict(foreach=False, capturable=True)],
)
def test_bad_steps_have_no_effect_and_fused_kernels_do_not_synchronize(options):
    def train(kinds, guarded):
        net = Net().to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **options)
        optim = OptimWrapper(optimizer, clip_grad=dict(max_norm=1.0))
        optim.parts += [SkipNonFinite(net, torch.device(DEVICE.type, 0))] if guarded else []
        step = EagerStep(lambda x: sum_losses(net(x)), net, optim)
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(4, 8, generator=generator).to(DEVICE) for _ in range(kinds.count("good"))]
        bad = torch.full((4, 8), math.nan, device=DEVICE)
        batches = [data.pop(0) if kind == "good" else bad for kind in kinds]
        for batch in batches[:2]:
            step(batch)
        with no_waiting() if guarded and options.get("fused") else nullcontext():
            for batch in batches[2:]:
                step(batch)
        return net.state_dict(), optimizer.state_dict()["state"]

    weights, state = train(["bad", "good", "bad", "good", "bad", "good"], True)
    weights2, state2 = train(["good"] * 3, False)
    for name, value in weights2.items():
        assert torch.equal(weights[name], value), name
    for number, values in state2.items():
        for name, value in values.items():
            assert torch.equal(state[number][name], value), (number, name)


@cuda_only
def test_tf32_changes_matrix_products_in_its_context():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("requires compute capability 8.0")
    x = torch.randn(512, 512, device="cuda")
    exact = x @ x
    with tf32():
        rounded = x @ x
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.5)
    assert torch.equal(x @ x, exact)
