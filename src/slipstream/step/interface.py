"""Interfaces of training steps. Unlike the compiled step itself, they are imported in every run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

__all__ = ["CompiledStep", "Step"]


class Step(Protocol):
    """Interface of a training step."""

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on `batch`, and return the values to log, including `loss`, as 0-dim tensors on the device."""
        ...


class CompiledStep(ABC):
    """A step that is compiled as one graph, if possible; `GraphStep` in `step/graph.py` implements it."""

    batches: int
    """Number of batches that the compiled code has trained on."""

    @property
    @abstractmethod
    def uses_graph(self) -> bool:
        """Whether the step uses a graph, either now or once the graph has been compiled and verified."""

    @property
    @abstractmethod
    def has_graph(self) -> bool:
        """Whether the step has a compiled and verified graph, which it uses for batches of the same shape."""

    @abstractmethod
    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""

    @abstractmethod
    def pause(self) -> None:
        """Stop a background compilation; it restarts with the next batch."""

    @abstractmethod
    def close(self) -> None:
        """Drop the compiled code; later batches run eagerly."""
