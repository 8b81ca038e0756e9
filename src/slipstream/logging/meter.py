"""Collect the outputs of training steps and read them from the device at intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.errors import LossError, NonFiniteLossError
from slipstream.logging.message_hub import MessageHub

_Key = tuple[int, str]  # index of the pending step, name of the output
_Step = tuple[int, dict[str, Tensor], int]  # iteration, outputs, number of samples
_NonFinite = tuple[int, str, float]  # iteration, name and value of the loss


class Meter:
    """Keep each step's outputs on the device until `flush` reads all of them in one transfer.

    Args:
        hub: the hub that records every value as the scalar `train/<name>`, in step order.
        max_pending: number of steps after which `record` calls `flush` to limit device memory use.
    """

    def __init__(self, hub: MessageHub, max_pending: int = 1000) -> None:
        self.hub = hub
        self.max_pending = max_pending
        # Whether to drop non-finite values instead of raising an error; set if the affected steps are skipped.
        self.tolerant = False
        # Functions that `flush` calls with the iteration and outputs of each step that was read.
        self.on_read: list[Callable[[Sequence[tuple[int, Mapping[str, float]]]], None]] = []
        # Iteration of the last recorded step; 0 if there is none.
        self.newest = 0
        # For each loss, the sum of values x samples, and the number of samples, of the steps since the epoch began.
        self.sums: dict[str, list[float]] = {}
        self._pending: list[_Step] = []

    def record(self, outputs: Mapping[str, Tensor], iteration: int, samples: int = 1) -> None:
        """Store a step's outputs without a device synchronization.

        Args:
            outputs: 0-dim tensors by name. The next step must not overwrite them; clone the outputs of a CUDA
                graph. Names may vary between steps.
            iteration: iteration number of this step.
            samples: number of samples in this step, the weight of its losses in `sums`.

        Raises:
            LossError: if an output is not a 0-dim tensor.
            NonFiniteLossError: raised by `flush`, which runs after every `max_pending` steps.
        """
        detached = {}
        for name, value in outputs.items():
            if not isinstance(value, Tensor) or value.ndim:
                raise _not_a_scalar(name, value, iteration)
            # A tensor attached to the autograd graph would keep all activations of the step alive.
            detached[name] = value.detach() if value.requires_grad else value
        self._pending.append((iteration, detached, samples))
        self.newest = iteration
        if len(self._pending) >= self.max_pending:
            self.flush()

    def flush(self) -> None:
        """Transfer the pending values to the hub, with one transfer per device.

        Raises:
            NonFiniteLossError: if an output with `loss` in its name is NaN or infinite and the meter is not `tolerant`.
                The hub contains all pending values when the error is raised.
        """
        pending, self._pending = self._pending, []
        values = _read(pending)
        non_finite = self._record(pending, values)
        if non_finite and not self.tolerant:
            raise _first_error(non_finite)
        if self.on_read:
            steps = [(i, {name: values[n, name] for name in out}) for n, (i, out, _) in enumerate(pending)]
            for function in self.on_read:
                function(steps)

    def _record(self, pending: Sequence[_Step], values: Mapping[_Key, float]) -> list[_NonFinite]:
        """Write the values to the hub; return the losses that are not finite."""
        non_finite: list[_NonFinite] = []
        for index, (iteration, outputs, samples) in enumerate(pending):
            for name in outputs:
                value = values[index, name]
                finite = math.isfinite(value)
                if finite or not self.tolerant:
                    self.hub.update_scalar(f"train/{name}", value)
                if "loss" in name and not finite:
                    non_finite.append((iteration, name, value))
                elif "loss" in name:
                    total = self.sums.setdefault(name, [0.0, 0.0])
                    total[0] += value * samples
                    total[1] += samples
        return non_finite


def _first_error(non_finite: Sequence[_NonFinite]) -> NonFiniteLossError:
    # If a loss term is non-finite, so is the sum `loss`; report the term instead of the sum.
    term = min((b for b in non_finite if b[0] == non_finite[0][0]), key=lambda b: b[1] == "loss")
    return _non_finite(*term)


def _read(pending: list[_Step]) -> dict[_Key, float]:
    keys: dict[torch.device, dict[torch.dtype, list[_Key]]] = defaultdict(lambda: defaultdict(list))
    for index, (_, outputs, _samples) in enumerate(pending):
        for name, value in outputs.items():
            keys[value.device][value.dtype].append((index, name))
    values: dict[_Key, float] = {}
    for by_dtype in keys.values():
        dtype = torch.float64 if torch.float64 in by_dtype else torch.float32
        # Use one stack per dtype, because stacking int64 and fp16 values would convert all to fp16, which may overflow.
        stacks = [
            torch.stack([pending[i][1][name] for i, name in group]).to(dtype) for group in by_dtype.values()
        ]
        order = [key for group in by_dtype.values() for key in group]
        values.update(zip(order, torch.cat(stacks).tolist(), strict=True))
    return values


def _not_a_scalar(name: str, value: object, iteration: int) -> LossError:
    if isinstance(value, Tensor):
        description = f"a tensor of shape {tuple(value.shape)}; reduce it with .mean() or .sum()"
    else:
        description = f"{type(value).__name__}; return a 0-dim tensor, such as torch.tensor(value)"
    return LossError(
        f"the step's output '{name}' at iteration {iteration} must be a 0-dim tensor, not {description}"
    )


def _non_finite(iteration: int, name: str, value: float) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"'{name}' became {value} at iteration {iteration}. "
        "Lower the learning rate or add a warm-up, clip the gradients (clip_grad=dict(max_norm=1.0), or a smaller "
        "max_norm), check the data for NaN or wrong labels, or use bf16 instead of fp16",
        iteration,
    )
