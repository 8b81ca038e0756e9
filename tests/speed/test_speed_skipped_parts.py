"""Test that a skipped step does not change weights or step parts, with eager, fused and compiled updates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate
from slipstream.errors import NonFiniteLossError
from slipstream.step.parts import StepPart

COMPILE = dict(backend="aot_eager", cache=False)
FP16 = dict(precision="fp16")
CASES = {  # for each case: whether it uses `nan_guard`, and its options
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
    speed = dict(speed, nan_guard="skip") if guarded else speed
    step = accelerate(model, optimizer, F.mse_loss, speed=speed)
    scaler = step.optim.loss_scaler
    if scaler is not None:
        scaler.load_state_dict(scaler.state_dict() | {"scale": 16.0})
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


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize(
    "speed", [{}, dict(fused=True), dict(compile=COMPILE)], ids=["eager", "fused", "graph"]
)
def test_windows_with_a_bad_batch_are_skipped_in_an_own_loop(speed):
    bad = {3, 8}
    model, hand = norm_net(), norm_net()
    speed = dict(speed, nan_guard="skip", accumulate=2, ema=dict(type="swa"))
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), F.mse_loss, speed)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1, momentum=0.9)
    average, data = [], [(x.double(), y.double()) for x, y in batches(12)]
    for start in range(0, len(data), 2):
        window = data[start : start + 2]
        if not bad & {start, start + 1}:
            for x, y in window:
                (F.mse_loss(hand(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        average.append({k: v.clone() for k, v in hand.state_dict().items() if v.is_floating_point()})
        for number, (x, y) in enumerate(window, start):
            step((x * torch.inf if number in bad else x, y))
    torch.testing.assert_close(model.state_dict(), hand.state_dict(), rtol=1e-9, atol=1e-12)
    for name in average[0]:
        mean = torch.stack([state[name] for state in average]).mean(0)
        torch.testing.assert_close(step.average.module.state_dict()[name], mean, rtol=1e-9, atol=1e-12)
    assert step.compiled_scope == ("step" if "compile" in speed else None)


def test_too_many_skipped_updates_end_an_own_loop(caplog):
    model, data = net(), batches(8)
    options = dict(nan_guard=dict(action="skip", max_skipped=2))
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, options)
    for number, (x, y) in enumerate(data[:6]):
        step((x * torch.inf if number in (0, 5) else x, y))
    assert (
        caplog.messages == ["Skipped 1 update with a non-finite loss or gradient in the last 2 batches"] * 2
    )
    step((data[6][0] * torch.inf, data[6][1]))
    with pytest.raises(NonFiniteLossError, match="the last 3 steps were skipped"):
        step((data[7][0] * torch.inf, data[7][1]))
