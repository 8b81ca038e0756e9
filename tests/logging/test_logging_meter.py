import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators import DEVICE, no_waiting
from slipstream.errors import NonFiniteLossError
from slipstream.logging import MessageHub, Meter


class ReadCounter(TorchDispatchMode):
    """A dispatch mode that records the names of all operations."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func.name())
        return func(*args, **(kwargs or {}))


def history(hub, key):
    return hub.get_scalar(key).data[0].tolist()


def test_values_are_recorded_in_step_order():
    hub = MessageHub("a")
    meter = Meter(hub)
    expected = {}
    for step in range(20):
        outputs = {
            "loss": torch.tensor(step / 3, dtype=torch.float32),
            "half": torch.tensor(step / 3, dtype=torch.bfloat16),
            "pixels": torch.tensor(70_000 + step),
            "fp16": torch.tensor(step, dtype=torch.float16),
        }
        if step % 3 == 0:
            outputs = {"extra": torch.tensor(step % 2 == 0), **outputs}
        for key, value in outputs.items():
            expected.setdefault(f"train/{key}", []).append(float(value))
        meter.record(outputs, step)
    assert not hub.log_scalars
    meter.flush()
    assert {key: history(hub, key) for key in hub.log_scalars} == expected


def test_record_runs_no_tensor_operations():
    meter = Meter(MessageHub("a"))
    steps = [{"loss": torch.rand(()), "acc": torch.rand(())} for _ in range(100)]
    with ReadCounter() as recording:
        for index, outputs in enumerate(steps):
            meter.record(outputs, index)
    assert recording.operations == []
    with ReadCounter() as flushing:
        meter.flush()
    assert "aten::_local_scalar_dense" not in flushing.operations
    assert len(flushing.operations) < 10


def test_autograd_graph_of_a_loss_is_released():
    meter = Meter(MessageHub("a"))
    loss = torch.ones((), requires_grad=True) * 2
    meter.record({"loss": loss}, 0)
    assert not meter._pending[0][1]["loss"].requires_grad


def test_full_meter_flushes_automatically():
    hub = MessageHub("a")
    meter = Meter(hub, max_pending=3)
    for step in range(7):
        meter.record({"loss": torch.tensor(float(step))}, step)
    assert history(hub, "train/loss") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_loss_error_names_key_and_first_iteration(bad):
    hub = MessageHub("a")
    meter = Meter(hub)
    for iteration in range(100, 106):
        broken = torch.tensor(bad if iteration in (103, 105) else 1.0)
        meter.record({"acc": torch.tensor(0.5), "decode.loss_ce": broken}, iteration)
    with pytest.raises(NonFiniteLossError, match=r"'decode.loss_ce' became .* at iteration 103\..*bf16"):
        meter.flush()
    assert len(hub.get_scalar("train/decode.loss_ce")) == 6
    assert len(hub.get_scalar("train/acc")) == 6
    meter.flush()  # the values are no longer pending, so the next flush raises no error
    assert len(hub.get_scalar("train/acc")) == 6


def test_other_non_finite_outputs_are_only_recorded():
    hub = MessageHub("a")
    meter = Meter(hub)
    meter.record({"grad_norm": torch.tensor(float("inf"))}, 0)
    meter.flush()
    assert history(hub, "train/grad_norm") == [float("inf")]


@pytest.mark.gpu
def test_record_on_the_device_does_not_synchronize():
    hub = MessageHub("a")
    meter = Meter(hub)
    with no_waiting():
        for step in range(10):
            meter.record({"loss": torch.full((), step, device=DEVICE, dtype=torch.float16)}, step)
    meter.record({"loss": torch.full((), 10.0)}, 10)
    meter.flush()
    assert history(hub, "train/loss") == list(range(11))
