"""Reads the training step's outputs rarely, so that the step never waits for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slipstream.errors import LossError, NonFiniteLossError
from slipstream.logging.message_hub import MessageHub

__all__ = ["Meter"]

_Place = tuple[int, str]  # index of the pending step, name of the output


class Meter:
    """Keeps each step's outputs on the device until `flush` reads all of them in one transfer.

    Args:
        hub: gets every value as the scalar `train/<name>`, in the order of the steps.
        max_pending: after how many steps `record` flushes by itself, which bounds the device memory.
    """

    def __init__(self, hub: MessageHub, max_pending: int = 1000) -> None:
        self.hub = hub
        self.max_pending = max_pending
        self.tolerant = False
        """Leave values that are not finite out, where steps with such a loss are skipped, in the place of an error."""
        self.locate: Callable[[], str] | None = None
        """Tells where in the model a loss stopped being finite."""
        self._pending: list[tuple[int, dict[str, Tensor]]] = []

    def record(self, outputs: Mapping[str, Tensor], iteration: int) -> None:
        """Remember a step's outputs without waiting for them.

        Args:
            outputs: 0-dim tensors by name; each must be the step's own, not a buffer that the next step
                overwrites (a replayed CUDA graph's outputs are: clone them). Names may vary between steps.
            iteration: what a `NonFiniteLossError` calls this step.

        Raises:
            LossError: an output is not a 0-dim tensor.
            NonFiniteLossError: as `flush`, which runs after every `max_pending` steps.
        """
        kept = {}
        for name, value in outputs.items():
            if not isinstance(value, Tensor) or value.ndim:
                raise _not_a_scalar(name, value, iteration)
            # A tensor with a graph would keep the whole step's activations alive.
            kept[name] = value.detach() if value.requires_grad else value
        self._pending.append((iteration, kept))
        if len(self._pending) >= self.max_pending:
            self.flush()

    def flush(self) -> None:
        """Read what is pending, with one transfer per device, into the hub.

        Raises:
            NonFiniteLossError: an output with `loss` in its name was NaN or infinite; everything pending is
                in the hub by then. Not if the meter is `tolerant`.
        """
        pending, self._pending = self._pending, []
        values = _read(pending)
        broken: list[tuple[int, str, float]] = []
        for index, (iteration, outputs) in enumerate(pending):
            for name in outputs:
                value = values[index, name]
                finite = math.isfinite(value)
                if finite or not self.tolerant:
                    self.hub.update_scalar(f"train/{name}", value)
                if "loss" in name and not finite:
                    broken.append((iteration, name, value))
        if broken and not self.tolerant:
            first = broken[0][0]
            # A part tells more than the sum `loss`, which is broken with it.
            part = min((b for b in broken if b[0] == first), key=lambda b: b[1] == "loss")
            raise _non_finite(*part, self.locate() if self.locate else "")


def _read(pending: list[tuple[int, dict[str, Tensor]]]) -> dict[_Place, float]:
    places: dict[torch.device, dict[torch.dtype, list[_Place]]] = defaultdict(lambda: defaultdict(list))
    for index, (_, outputs) in enumerate(pending):
        for name, value in outputs.items():
            places[value.device][value.dtype].append((index, name))
    values: dict[_Place, float] = {}
    for by_dtype in places.values():
        wide = torch.float64 if torch.float64 in by_dtype else torch.float32
        # One stack per dtype: stacking mixed ones would promote, and fp16 with int64 overflows in fp16.
        stacks = [
            torch.stack([pending[i][1][name] for i, name in group]).to(wide) for group in by_dtype.values()
        ]
        order = [place for group in by_dtype.values() for place in group]
        values.update(zip(order, torch.cat(stacks).tolist(), strict=True))
    return values


def _not_a_scalar(name: str, value: object, iteration: int) -> LossError:
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)}; reduce it with .mean() or .sum()"
    else:
        what = f"{type(value).__name__}; return a 0-dim tensor, such as torch.tensor(value)"
    return LossError(
        f"the step's output '{name}' at iteration {iteration} must be a 0-dim tensor, not {what}"
    )


def _non_finite(iteration: int, name: str, value: float, where: str) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"'{name}' became {value} at iteration {iteration}. {where}{'. ' if where else ''}"
        "Lower the learning rate or add a warm-up, clip the gradients (clip_grad=dict(max_norm=1.0)), "
        "look for NaN or wrong labels in the data, or use bf16 in the place of fp16"
    )
