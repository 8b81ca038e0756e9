"""The heart: one training step."""

from slipstream.step.eager import EagerStep, Step, sum_losses

__all__ = ["EagerStep", "Step", "sum_losses"]
