from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.errors import ModelError
from slipstream.zoo import MultiHeadCrossEntropy

IGNORE = 255


def reference(logits, targets, ignore_index=IGNORE):
    """Return the float64 mean of -log softmax over the pixels that are not ignored, or 0 if there are none."""
    z = logits.detach().double().numpy()
    t = targets.numpy().astype(np.int64)
    z = np.moveaxis(z, 1, -1).reshape(-1, z.shape[1])
    t = t.reshape(-1)
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    keep = t != ignore_index
    return -log_p[keep, t[keep]].sum() / max(keep.sum(), 1)


def batch(seed=0, heads=4, ignored=0.3, dtype=torch.uint8):
    torch.manual_seed(seed)
    outputs = tuple(torch.randn(2, 5, 8, 9, requires_grad=True) for _ in range(heads))
    targets = torch.randint(0, 5, (2, 8, 9))
    targets[torch.rand(targets.shape) < ignored] = IGNORE
    return outputs, targets.to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.sampled_from([torch.uint8, torch.int64, torch.int32]),
    st.lists(st.floats(0, 3), min_size=4, max_size=4),
)
def test_loss_matches_the_float64_reference(seed, ignored, dtype, weights):
    outputs, targets = batch(seed, ignored=ignored, dtype=dtype)
    losses = MultiHeadCrossEntropy(tuple(weights))(outputs, targets)
    assert list(losses) == ["loss_main", "loss_aux0", "loss_aux1", "loss_aux2"]
    for loss, weight, logits in zip(losses.values(), weights, outputs, strict=True):
        assert loss.shape == ()
        assert loss.item() == pytest.approx(weight * reference(logits, targets), rel=1e-5, abs=1e-6)


def test_loss_and_gradient_match_torch():
    (logits,), targets = batch(heads=1)
    (loss,) = MultiHeadCrossEntropy((1.0,))(logits, targets).values()
    (gradient,) = torch.autograd.grad(loss, logits)
    theirs = torch.nn.CrossEntropyLoss(ignore_index=IGNORE)(logits, targets.long())
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, logits)[0])


def test_batch_of_ignored_pixels_has_zero_loss_and_zero_gradient():
    outputs, targets = batch(ignored=1.1)
    assert (targets == IGNORE).all()
    total = sum(MultiHeadCrossEntropy()(outputs, targets).values())
    total.backward()
    assert total.item() == 0
    assert all((logits.grad == 0).all() for logits in outputs)


@pytest.mark.parametrize("ignored", [0.3, 1.1])
def test_class_weights_match_the_float64_reference(ignored):
    outputs, targets = batch(heads=2, ignored=ignored)
    class_weights = np.array([0.5, 2.0, 0.0, 1.0, 3.0])
    losses = MultiHeadCrossEntropy((1.0, 0.4), weight=list(class_weights))(outputs, targets)
    for loss, factor, logits in zip(losses.values(), (1.0, 0.4), outputs, strict=True):
        z = logits.detach().double().numpy()
        log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
        total, divisor = 0.0, 0.0
        for n, row, column in np.ndindex(targets.shape):
            label = int(targets[n, row, column])
            if label != IGNORE:
                total -= class_weights[label] * log_p[n, label, row, column]
                divisor += class_weights[label]
        assert loss.item() == pytest.approx(factor * total / (divisor or 1), rel=1e-5)


def test_loss_does_not_synchronize_with_the_device():
    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket not in (
                torch.ops.aten._local_scalar_dense,
                torch.ops.aten.nonzero,
                torch.ops.aten.masked_select,
            ), f"{func} synchronizes with the device"
            return func(*args, **(kwargs or {}))

    outputs, targets = batch()
    with NoSync():
        sum(MultiHeadCrossEntropy()(outputs, targets).values()).backward()


@pytest.mark.parametrize(("heads", "weights"), [(3, (1.0, 0.4)), (4, (1.0,) * 11), (1, (1.0, 0.4))])
def test_number_of_weights_other_than_the_number_of_outputs_raises_error(heads, weights):
    outputs, targets = batch(heads=heads)
    message = rf"per network output \({heads}\), but `weights` has {len(weights)}.*class weights .* `weight`"
    with pytest.raises(ModelError, match=message):
        MultiHeadCrossEntropy(weights)(outputs, targets)
