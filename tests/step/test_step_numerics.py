"""Tests of `all_finite`, `LossScale` and `HostNumber`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.step.numerics import LossScale, all_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_value_is_detected(value, dtype):
    tensors = [torch.ones(3, dtype=dtype), torch.zeros(0), torch.ones(2, 2, dtype=dtype)]
    assert all_finite(tensors)
    tensors[2][1, 0] = value
    assert not all_finite(tensors)
    assert all_finite([torch.zeros(0)])  # an empty shard


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), max_size=25),
    st.integers(1, 4),
    st.sampled_from([2.0, 1.5, 1.0001]),
    st.sampled_from([1.0, 2.0**16, 2.0**127]),
)
def test_traced_loss_scale_matches_gradscaler(steps, interval, growth, start):
    options = dict(init_scale=start, growth_factor=growth, growth_interval=interval)
    scaler, reference = (torch.amp.GradScaler("cpu", **options) for _ in range(2))
    scale = LossScale(scaler, True, CPU)
    reference.scale(torch.zeros(()))
    for finite in steps:
        scale.adapt_traced(torch.tensor(finite))
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
