"""`StepPart`: operations around the optimizer update, such as gradient clipping.

`OptimWrapper.parts` is the ordered list of parts. The eager step (`EagerStep`) calls their methods, and the compiled
step (`GraphStep`) traces the same calls, so each part is implemented only once. The methods must be traceable, except
`before_batch` and, if `on_host` is set, `after_batch`. Traceable methods must not call `.item()` or branch on a
tensor's value, and must use a `slipstream.step.numerics.HostNumber` for each number that changes between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not

from torch import Tensor, nn

from slipstream.step.numerics import HostNumber

__all__ = ["StepPart", "has_gradients", "trained_params"]


class StepPart:
    """Base class for operations around the optimizer update; subclasses override the methods they need.

    The step calls the methods in the following order, each for all parts in list order:

    1. `before_batch`: on the host, before each batch.
    2. `gradients`: once per batch, after the forward and backward passes (at most one part in a list may override it).
    3. `before_update`, `after_update`: at the end of an accumulation window, around `optimizer.step()`.
    4. `after_batch`: after each batch.
    5. `count_batch`: on the host, after each completed batch.

    Attributes:
        needs_previous: whether `after_update` receives copies of the parameters before the update.
        on_host: whether `after_batch` must run on the host, outside a compiled step.
        replaces_gradients: whether `gradients` is overridden.
        nonfinite: a one-element tensor that is not 0 if a loss of the accumulation window was not finite. If it is
            set, the update is skipped in this case, and if a gradient is not finite.
        max_norm: the norm above which the part changes all gradients.
        limit: `max_norm` as a number that graphs read. Graphs are also verified with a lower and a higher number.
        implements: the names of the methods that the class overrides; the step calls only these.
    """

    needs_previous: bool = False
    on_host: bool = False
    replaces_gradients: bool = False
    nonfinite: Tensor | None = None
    max_norm: float | None = None
    limit: HostNumber | None = None
    implements: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.implements = frozenset(
            name for name, method in vars(StepPart).items() if getattr(cls, name) is not method
        )

    def before_batch(self) -> None:
        """Prepare for the next batch; for example, write changed numbers to tensors. Do not count it here."""

    def after_loss(self, loss: Tensor) -> None:
        """Observe the loss of a batch, before it is scaled."""

    def gradients(
        self, params: Sequence[nn.Parameter], compute: Callable[[], list[Tensor]], first: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of the batch.

        Args:
            params: the trained parameters; any changes to them must be undone before this method returns.
            compute: runs the forward and backward passes again on the same batch with the current parameters, and
                returns the gradients.
            first: the gradients of the first forward and backward passes, with the shapes of `params`.
        """
        return first

    def before_update(
        self, params: Sequence[nn.Parameter], grads: list[Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Modify `grads` in place. They are unscaled and averaged across processes.

        Returns:
            A dict of 0-dim tensors to log, or None.
        """

    def after_update(self, params: Sequence[nn.Parameter], previous: Sequence[Tensor]) -> None:
        """Modify `params` in place after the update.

        Args:
            params: the trained parameters.
            previous: copies of `params` before the update; may be empty unless `needs_previous` is set.
        """

    def after_window(self, finite: Tensor | None) -> None:
        """Process the end of an accumulation window, on the host, without waiting for the device.

        Args:
            finite: whether the losses and gradients were finite (0-dim bool on the device), or None if this was not
                checked.
        """

    def after_batch(self) -> None:
        """Process the current weights; for example, update their average."""

    def count_batch(self) -> None:
        """Count the completed batch; a batch whose step raises an error is not counted."""

    def state(self) -> Mapping[str, Tensor]:
        """Return a dict that maps names to the tensors that the part modifies in place and never replaces."""
        return {}


def trained_params(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trainable parameters that have a gradient."""
    return [param for param in params if param.requires_grad and param.grad is not None]


def has_gradients(params: Iterable[nn.Parameter]) -> bool:
    """Return whether any parameter has a gradient."""
    return any(map(is_not, map(attrgetter("grad"), params), repeat(None)))
