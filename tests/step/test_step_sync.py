"""Each gradient is sent exactly once, in buckets that start with the last layers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.step.sync import GradientSync


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30), st.integers(1, 400))
def test_every_gradient_is_in_one_bucket_of_its_dtype(sizes, limit):
    grads = [torch.zeros(n, dtype=torch.float16 if half else torch.float32) for n, half in sizes]
    buckets = GradientSync(2, bucket_bytes=limit).buckets(grads)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(grads)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({grads[i].dtype for i in bucket}) == 1
        # No gradients are added to a full bucket.
        assert sum(grads[i].numel() * grads[i].element_size() for i in bucket[:-1]) < limit


def test_last_layers_are_sent_first():
    grads = [torch.zeros(10) for _ in range(6)]
    assert GradientSync(2, bucket_bytes=80).buckets(grads) == [[5, 4], [3, 2], [1, 0]]
