"""What a training step does around the optimizer's update, as one ordered list of parts.

`OptimWrapper.parts` is the list. The eager step calls the parts (`apply_update` and `EagerStep`); the compiled step
traces the very same calls (`GraphStep`). A new part is therefore written once. Its methods must be traceable, unless
`on_host` says otherwise: no `.item()`, no branch on a tensor's value; a number that changes is a 0-dim tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not

from torch import Tensor, nn

__all__ = ["StepPart", "apply_update", "has_gradients"]


class StepPart:
    """Work around the optimizer's update; a subclass overrides what it needs.

    The methods are called in this order, each for all parts in the order of the list:

    1. `before_batch`, on the host, before each batch.
    2. `gradients`, once a batch, in place of a plain forward and backward (at most one part of a list).
    3. `before_update`, `after_update`: at the end of an accumulation window, around `optimizer.step()`.
    4. `after_batch`, after each batch.
    """

    needs_previous: bool = False
    """Whether `after_update` gets the parameters as they were before the update."""
    on_host: bool = False
    """Whether `after_batch` must run on the host, after a compiled step and not in it."""
    replaces_gradients: bool = False
    """Whether `gradients` is overridden."""

    def before_batch(self) -> None:
        """Prepare the coming batch on the host: count it, write changed numbers into tensors."""

    def gradients(
        self,
        params: Sequence[nn.Parameter],
        compute: Callable[[], list[Tensor]],
        first: list[Tensor],
    ) -> list[Tensor]:
        """Return the gradients of the batch, which `compute()` computes again at the parameters as they are then.

        Args:
            params: the trained parameters; changes to them must be undone before returning.
            compute: runs forward and backward once more on the same batch.
            first: the gradients of the first forward and backward, of the same shapes as `params`.
        """
        return first

    def before_update(
        self, params: Sequence[nn.Parameter], grads: list[Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Change `grads` in place (unscaled, averaged over processes); return 0-dim tensors to log, if any."""

    def after_update(self, params: Sequence[nn.Parameter], previous: Sequence[Tensor]) -> None:
        """Change `params` in place after the update; `previous` holds them as they were, if `needs_previous`."""

    def after_batch(self) -> None:
        """Follow the weights, for example with an average of them."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that the part changes, by name."""
        return {}


def apply_update(
    parts: Sequence[StepPart],
    params: Sequence[nn.Parameter],
    grads: list[Tensor],
    update: Callable[[list[Tensor]], None],
) -> dict[str, Tensor]:
    """Run the parts around `update(grads)`, which moves `params`; return what the parts log.

    Called without gradient tracking, at the end of an accumulation window, eagerly and in a compiled step.
    """
    logs: dict[str, Tensor] = {}
    for part in parts:
        logs.update(part.before_update(params, grads) or {})
    previous: list[Tensor] = []
    if any(part.needs_previous for part in parts):
        previous = [param.detach().clone() for param in params]
    update(grads)
    for part in parts:
        part.after_update(params, previous)
    return logs


def has_gradients(params: Iterable[nn.Parameter]) -> bool:
    """Say whether any parameter has a gradient."""
    return any(map(is_not, map(attrgetter("grad"), params), repeat(None)))
