"""The training step: eager, or compiled as one graph."""

from slipstream.step.eager import EagerStep, Step, sum_losses

__all__ = ["EagerStep", "Step", "sum_losses"]
