"""Skipped steps on an NPU leave weights, buffers and optimizer state unchanged."""

import math

import pytest
import torch
from npu_runs import assert_equal_on_the_host, batches, by_hand, net
from torch.nn import functional as F

from slipstream.optim import OptimWrapper
from slipstream.speed.nan_guard import SkipNonFinite
from slipstream.step import EagerStep, sum_losses

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-2),
    "AdamW, for loop": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-2, foreach=False),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-2, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1, eps=1e-2),
    "AdamP": lambda params: pytorch_optimizer.AdamP(params, lr=0.1, eps=1e-2),
    "Lamb": lambda params: pytorch_optimizer.Lamb(params, lr=0.1),
}
BAD = {3, 4, 8}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_do_not_count(name):
    """Fused kernels skip the step themselves; for other optimizers, the host waits for the device."""
    model = net().to("npu")
    optim = OptimWrapper(OPTIMIZERS[name](model.parameters()))
    guard = SkipNonFinite(model, torch.device("npu", 0))
    optim.parts.append(guard)

    def losses(batch):
        inputs, targets = batch
        return {"loss": F.cross_entropy(model(inputs), targets)}

    step = EagerStep(lambda batch: sum_losses(losses(batch)), model, optim)
    data = batches(12)
    for number, (inputs, targets) in enumerate(data):
        bad = torch.full_like(inputs, math.nan)
        batch = ((bad if number in BAD else inputs).to("npu"), targets.to("npu"))
        with torch_npu.watching() as seen:
            step(batch)
        if number > 0:
            assert bool(seen) == (name != "AdamW, fused"), seen
    assert guard.read() == len(BAD)
    good = [batch for number, batch in enumerate(data) if number not in BAD]
    assert_equal_on_the_host(model, by_hand(OPTIMIZERS[name], good), atol=2e-5)
