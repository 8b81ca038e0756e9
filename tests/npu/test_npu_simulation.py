"""Test that the simulated NPU detects missing waits, unsafe memory reuse, reads by the host, and mixed devices."""

import pytest
import torch


def late_copy(source):
    """Start a copy that completes as late as possible. Return the copy and the event that marks its completion."""
    stream = torch.Stream("npu")
    with stream:
        return source.to("npu", non_blocking=True), stream.record_event()


def test_use_of_a_batch_without_waiting_for_its_copy_raises_an_error():
    copied, event = late_copy(torch.ones(4).pin_memory())
    with pytest.raises(RuntimeError, match=r"aten::mul.* on stream 0 uses memory .* may still write"):
        copied * 2
    torch.accelerator.current_stream().wait_event(event)
    assert (copied * 2).cpu().tolist() == [2.0] * 4


def test_use_of_tensors_from_another_stream_without_synchronization_raises_an_error():
    stream, current = torch.Stream("npu"), torch.accelerator.current_stream()
    x = torch.ones(4, device="npu")
    with stream:
        with pytest.raises(RuntimeError, match="may still write"):
            x * 2
        stream.wait_stream(current)
        y = x * 2
    x + 1  # both streams may read
    with pytest.raises(RuntimeError, match="may still read"):
        x.add_(1)
    torch.accelerator.synchronize()
    assert x.add_(y).cpu().tolist() == [3.0] * 4


def test_tensors_on_two_devices_raise_an_error():
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="npu") + torch.ones(2)
