"""Tests of `all_finite`, `restore_unless`, `LossScale` and `Scalar`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.step.numerics import LossScale, Scalar, all_finite, restore_unless

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_value_is_detected(value, dtype):
    tensors = [torch.ones(3, dtype=dtype), torch.zeros(0), torch.ones(2, 2, dtype=dtype)]
    assert all_finite(tensors)
    tensors[2][1, 0] = value
    assert not all_finite(tensors)


def test_largest_representable_numbers_count_as_finite():
    assert all_finite([torch.full((9,), torch.finfo(torch.float32).max)])


def test_keep_unless_restores_tensors_in_place():
    tensors, before = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    restore_unless(torch.tensor(True), tensors, before)
    assert all(bool(t.all()) for t in tensors)
    restore_unless(torch.tensor(False), tensors, before)
    assert not any(bool(t.any()) for t in tensors)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), max_size=25),
    st.integers(1, 4),
    st.sampled_from([2.0, 1.5, 1.0001]),
    st.sampled_from([1.0, 2.0**16, 2.0**127]),
)
def test_loss_scale_matches_gradscaler(steps, interval, growth, start):
    options = dict(init_scale=start, growth_factor=growth, growth_interval=interval)
    scaler, reference = (torch.amp.GradScaler("cpu", **options) for _ in range(2))
    scale = LossScale(scaler, True, CPU)
    reference.scale(torch.zeros(()))
    for finite in steps:
        scale.adapt(torch.tensor(finite))
        torch._amp_update_scale_(
            reference._scale,
            reference._growth_tracker,
            torch.tensor(float(not finite)),
            growth,
            0.5,
            interval,
        )
        assert torch.equal(scaler._scale, reference._scale)
        assert torch.equal(scaler._growth_tracker, reference._growth_tracker)
    assert scaler.state_dict() == reference.state_dict()


def test_fixed_loss_scale_does_not_change():
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=8.0), False, CPU)
    scale.adapt(torch.tensor(False))
    assert float(scale.scale) == 8.0
    torch.testing.assert_close(scale.unscale([torch.tensor([16.0])]), [torch.tensor([2.0])])


def test_scalar_keeps_its_tensor():
    scalar = Scalar(1.0, CPU)
    place = scalar.tensor
    scalar.set(0.25)
    assert scalar.tensor is place
    assert float(place) == 0.25


def test_scalar_is_read_as_a_number():
    assert Scalar(0.5, CPU).read().shape == ()
