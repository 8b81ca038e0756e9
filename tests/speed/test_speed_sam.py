"""Sharpness-aware minimization matches a plain loop with two passes per batch."""

import pytest
import torch
import torch.nn.functional as F

from part_runs import HOW, Net, adamw, assert_equal, batches, by_hand, differ, run, sgd, trained
from slipstream import accelerate
from slipstream.hooks import Hook
from slipstream.speed.sam import SamOptions

RHO = 0.3


def perturbed(model, params, loss_of, rho=RHO, eta=None):
    """Return the gradients at the perturbed weights. The BatchNorm statistics are updated once."""
    grads = torch.autograd.grad(loss_of(), params)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    scales = [torch.ones_like(param) for param in params]
    if eta is not None:
        named = zip(model.named_parameters(), scales, strict=True)
        scales = [p.detach().abs() + eta if name.endswith("weight") else ones for (name, p), ones in named]
    norm = sum(float((t * g).square().sum()) for t, g in zip(scales, grads, strict=True)) ** 0.5
    originals = [param.detach().clone() for param in params]
    for param, grad, scale in zip(params, grads, scales, strict=True):
        param.data += rho * scale**2 * grad / norm
    found = torch.autograd.grad(loss_of(), params)
    for param, original in zip(params, originals, strict=True):
        param.data = original
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return list(found)


def adaptive(model, params, loss_of):
    return perturbed(model, params, loss_of, 2.0, 0.01)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_sam_matches_a_plain_loop(how, together):
    expected = by_hand(gradients=perturbed, together=together)
    assert differ(expected, by_hand(together=together))
    assert_equal(trained(how, together=together, sam=dict(rho=RHO)), expected)


@pytest.mark.parametrize("how", HOW)
def test_adaptive_option_scales_the_perturbation_by_the_weights(how):
    expected = by_hand(adamw, gradients=adaptive)
    assert differ(expected, by_hand(adamw, gradients=lambda *args: perturbed(*args, rho=2.0)))
    assert_equal(trained(how, adamw, sam=dict(rho=2.0, adaptive=True)), expected)


# ---- float16 and skipped steps ----------------------------------------------------------------------------

SCALE = dict(init_scale=2.0**40, backoff_factor=2.0**-30)


def in_float16(rho):
    """Train with a plain loop under float16 autocast. The first step overflows and is skipped."""
    model = Net().float()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)
    scale = 2.0**40
    for x, y in batches():

        def loss_of(x=x, y=y, scale=scale):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x.float()), y)
            return loss * scale

        if scale > 2.0**11:
            loss_of()  # update the BatchNorm statistics once
            scale *= 2.0**-30
            continue
        for param, grad in zip(params, perturbed(model, params, loss_of, rho), strict=True):
            param.grad = grad / scale
        optimizer.step()
    return None, model.state_dict(), None


class Weights(Hook):
    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append({n: p.detach().clone() for n, p in runner.model.named_parameters()})


class InFloat32(Net):
    def forward(self, x, y=None, mode="tensor"):
        return super().forward(x.float(), y, mode)


@pytest.mark.parametrize("how", HOW)
def test_overflow_skips_the_step_and_keeps_the_weights(how, tmp_path):
    model, record = InFloat32().float(), Weights()
    before = {name: param.clone() for name, param in model.named_parameters()}
    wrapper = dict(
        type="AmpOptimWrapper",
        dtype="float16",
        loss_scale=SCALE,
        optimizer=dict(type="SGD", lr=0.2, momentum=0.9, weight_decay=0.01),
    )
    found, _ = run(tmp_path, how, model=model, optimizer=wrapper, hooks=[record], sam=dict(rho=RHO))
    assert all(torch.equal(record.seen[0][name], param) for name, param in before.items())
    assert not torch.equal(record.seen[1]["head.weight"], before["head.weight"])
    exact = how == "eager"
    assert_equal(found, in_float16(RHO), rtol=1e-6 if exact else 5e-3, atol=1e-6 if exact else 5e-3)


@pytest.mark.parametrize("how", HOW)
def test_guard_skips_a_step_if_only_the_second_pass_is_nonfinite(how, tmp_path):
    class Brittle(Net):
        """A network whose loss is NaN if its first weight has changed."""

        def __init__(self):
            super().__init__()
            self.register_buffer("known", self.stem.weight.detach().clone())

        def forward(self, x, y=None, mode="tensor"):
            losses = super().forward(x, y, mode)
            moved = (self.stem.weight.detach() != self.known).any()
            return {"loss": losses["loss"] * torch.where(moved, torch.nan, 1.0)}

    model = Brittle()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found, _ = run(
        tmp_path, how, model=model, sam=dict(rho=RHO), nan_guard=dict(action="skip", max_skipped=100)
    )
    for name, value in found[1].items():
        assert torch.equal(value, before[name]), name


def test_part_appended_to_a_step_computes_the_gradients():
    """docs/extending.md allows to append a part before the first batch."""
    expected = trained("eager", sam=dict(rho=RHO))[0]
    model = Net()
    step = accelerate(model, sgd(model.parameters()), F.cross_entropy, {})
    step.optim.parts.append(SamOptions(rho=RHO).part(model, step.optim))
    assert torch.equal(torch.stack([step(batch)["loss"] for batch in batches()]), expected)
