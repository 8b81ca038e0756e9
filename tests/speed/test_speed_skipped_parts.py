"""Test that a skipped step does not change weights or step parts, with eager, fused and compiled updates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate
from slipstream.speed.nan_guard import SkipNonFinite
from slipstream.step.parts import StepPart

COMPILE = dict(backend="aot_eager", cache=False)
FP16 = dict(precision="fp16")
CASES = {  # for each case: whether it uses `SkipNonFinite`, and its options
    "eager": (True, {}),
    "fused": (True, dict(fused=True)),
    "compiled": (True, dict(compile=COMPILE)),
    "loss_scale": (False, FP16),
    "loss_scale_guarded": (True, FP16),
    "loss_scale_fused": (False, dict(**FP16, fused=True)),
    "loss_scale_compiled": (False, dict(**FP16, compile=COMPILE)),
}


class Shrink(StepPart):
    """A step part that scales the weights after each update, counts updates and records the largest gradient."""

    def __init__(self):
        self.updates = torch.zeros(1, dtype=torch.float64)
        self.largest = torch.zeros(1, dtype=torch.float64)

    def before_update(self, params, grads):
        self.updates.add_(1)
        self.largest.copy_(torch.maximum(self.largest, torch.stack([g.abs().max() for g in grads]).max()))

    def after_update(self, params, previous):
        for param in params:
            param.mul_(0.9)

    def state(self):
        return {"updates": self.updates, "largest": self.largest}


def batches(count=10):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)
    ]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def by_hand(bad):
    model, part = net(), Shrink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches()):
        if number in bad:
            continue
        F.mse_loss(model(x), y).backward()
        params = list(model.parameters())
        with torch.no_grad():
            part.before_update(params, [param.grad for param in params])
            optimizer.step()
            part.after_update(params, [])
        optimizer.zero_grad()
    return model, part


@pytest.mark.parametrize("bad", [{0, 4}, {1, 5, 6}], ids=["first", "later"])
@pytest.mark.parametrize("case", CASES)
def test_skipped_step_does_not_change_weights_or_parts(case, bad):
    guarded, speed = CASES[case]
    model, part = net(), Shrink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = accelerate(model, optimizer, F.mse_loss, speed=speed)
    scaler = step.optim.loss_scaler
    if scaler is not None:
        scaler.load_state_dict(scaler.state_dict() | {"scale": 16.0})
    if guarded:
        step.optim.parts.append(SkipNonFinite(model, torch.device("cpu")))
    step.optim.parts.append(part)
    for number, (x, y) in enumerate(batches()):
        step((x * torch.inf if number in bad else x, y))
    expected, by_loop = by_hand(bad)
    # float16 has about three significant digits
    tolerance = dict(rtol=2e-2, atol=2e-3) if scaler else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), **tolerance)
    assert float(part.updates) == float(by_loop.updates) == 10 - len(bad)
    torch.testing.assert_close(part.largest, by_loop.largest, **tolerance)
    assert step.compiled_scope == ("step" if "compile" in speed else None)
