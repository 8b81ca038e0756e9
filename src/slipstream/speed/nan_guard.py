"""Speed option: skip the step or stop if a loss or gradient is not finite, without a sync in every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import NonFiniteLossError
from slipstream.step.parts import StepPart
from slipstream.typecheck import PositiveInt, check

__all__ = ["NanGuardOptions", "SkipNonFinite"]


@dataclass(frozen=True)
class NanGuardOptions:
    """Options of `nan_guard=dict(...)`, which handles losses and gradients that are not finite; a string sets `action`.

    Without this option, a non-finite loss still stops the run the next time losses are read for logging.
    """

    shorthand: ClassVar = "action"

    action: Literal["stop", "skip"] = "stop"
    """`stop` ends the run the next time losses are read for logging. `skip` skips the step without updating weights."""
    max_skipped: PositiveInt = 50
    """Maximum number of consecutive skipped steps (`skip`). If the limit is exceeded, the run stops."""

    def __post_init__(self) -> None:
        check(self.max_skipped, PositiveInt, "max_skipped")

    def hook_cfg(self) -> dict[str, Any]:
        """Return the configuration of the hook that implements the option."""
        return {"type": "NanGuardHook", **asdict(self)}


class SkipNonFinite(StepPart):
    """Skips the update of an accumulation window in which a loss or gradient, on any rank, is not finite.

    A skipped update does not change weights, optimizer state or the model's buffers (BatchNorm statistics). With a loss
    scale, an overflow is such an update as well, and decreases the scale.

    Args:
        model: the model, unwrapped.
        device: device of the gradients.
        max_skipped: maximum number of consecutive skipped updates; the next `read` raises an error if there are more.
    """

    nonfinite: Tensor

    def __init__(self, model: nn.Module, device: torch.device, max_skipped: PositiveInt = 50) -> None:
        self.skips = torch.zeros(2, dtype=torch.int64, device=device)
        """The number of updates skipped since the last `read`, and the number of consecutive skipped updates."""
        self.nonfinite = torch.zeros(1, device=device)
        self.max_skipped = max_skipped
        self._model = model
        self._saved: dict[str, Tensor] = {}  # the buffers at the start of the accumulation window, flattened

    def before_batch(self) -> None:
        """Copy the model's buffers at the start of an accumulation window."""
        if not self._saved:
            for buffers, flat in self._flat_buffers():
                self._saved.update(
                    zip(buffers, flat.split([b.numel() for b in buffers.values()]), strict=True)
                )

    def _flat_buffers(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the buffers of each dtype and device by name, and their values in one tensor, to use few kernels.

        Buffers are found by name, because forward may assign a new tensor.
        """
        kinds: dict[Any, dict[str, Tensor]] = {}
        for name, buffer in self._model.named_buffers():
            kinds.setdefault((buffer.dtype, buffer.device), {})[name] = buffer
        for kind in kinds.values():
            yield kind, torch.cat([buffer.detach().reshape(-1) for buffer in kind.values()])

    def after_loss(self, loss: Tensor) -> None:
        """Record whether the loss is finite."""
        self.nonfinite.add_((~torch.isfinite(loss.detach())).to(self.nonfinite))

    @torch.no_grad()
    def after_window(self, finite: Tensor | None) -> None:
        """Restore the model's buffers if `finite` is False, and count the update."""
        assert finite is not None, "nonfinite is set"
        for buffers, flat in self._flat_buffers():
            old = torch.cat([self._saved.get(name, buffer.reshape(-1)) for name, buffer in buffers.items()])
            pieces = torch.where(finite, flat, old).split([buffer.numel() for buffer in buffers.values()])
            shaped = [piece.view(b.shape) for piece, b in zip(pieces, buffers.values(), strict=True)]
            torch._foreach_copy_(list(buffers.values()), shaped)
        self._saved = {}
        self.nonfinite.zero_()
        skipped = (~finite).to(torch.int64)
        total, consecutive = self.skips.unbind()
        self.skips.copy_(torch.stack([total + skipped, (consecutive + 1) * skipped]))

    def state(self) -> Mapping[str, Tensor]:
        """Return the flag that a step sets."""
        return {"whether a loss was not finite": self.nonfinite}

    def read(self) -> int:
        """Return the number of skipped updates since the last call. This synchronizes with the device.

        Raises:
            NonFiniteLossError: more than `max_skipped` consecutive updates were skipped.
        """
        total, consecutive = self.skips.tolist()
        self.skips[0] = 0
        if consecutive > self.max_skipped:
            steps = "last step was" if consecutive == 1 else f"last {consecutive} steps were"
            raise NonFiniteLossError(
                f"the {steps} skipped because the loss or a gradient was NaN or infinite. "
                f"nan_guard allows at most {self.max_skipped} in a row (max_skipped). Lower the learning rate, add a "
                "warm-up, or check the data for NaN or wrong labels"
            )
        return int(total)
