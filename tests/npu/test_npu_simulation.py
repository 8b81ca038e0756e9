"""The simulated NPU finds the mistakes that it exists for."""

import pytest
import torch

torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)


def late_copy(source):
    """Return a copy that runs late, and its event."""
    stream = torch.Stream("npu")
    with stream:
        return source.to("npu", non_blocking=True), stream.record_event()


def test_batch_without_a_wait_is_nan():
    copied, event = late_copy(torch.ones(4).pin_memory())
    assert (copied * 2).isnan().all()
    torch.accelerator.current_stream().wait_event(event)
    assert (copied * 2).cpu().tolist() == [2.0] * 4


def test_pinned_buffer_that_is_reused_too_early_changes_the_batch():
    source = torch.ones(4).pin_memory()
    copied, event = late_copy(source)
    source.fill_(7)
    torch.accelerator.current_stream().wait_event(event)
    assert copied.cpu().tolist() == [7.0] * 4


def test_copy_to_the_host_is_nan_until_the_host_waits():
    found = torch.ones(4, device="npu").to("cpu", non_blocking=True)
    assert found.isnan().all()
    torch.accelerator.synchronize()
    assert found.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("item", lambda x: x.sum().item()),
        ("device_to_host", lambda x: x.cpu()),
        ("hidden_sync", lambda x: x.nonzero()),
        ("hidden_sync", lambda x: x[x > 0]),
        ("synchronize", lambda x: torch.accelerator.synchronize()),
    ],
)
def test_each_host_read_is_counted_with_its_place(kind, read):
    x = torch.ones(3, device="npu")
    with torch_npu.watching() as seen:
        x.add_(1)
        assert not seen
        read(x)
    assert {found for found, _, _ in seen} == {kind}
    assert all(__file__ in stack for _, _, stack in seen)


def test_tensors_on_two_devices_are_an_error():
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="npu") + torch.ones(2)
