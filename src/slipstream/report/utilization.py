"""The model FLOPs utilization of a run."""

from __future__ import annotations

from slipstream.report.advice import mean_speed
from slipstream.report.record import RunRecord
from slipstream.scalars import number

__all__ = ["utilization", "utilization_note"]


def utilization(record: RunRecord) -> float | None:
    """Return the model's operations per second divided by the peak throughput of all devices; None if unknown.

    The first step, validation and checkpoints are excluded.
    """
    compute, speed = record.compute, mean_speed(record)
    peak = compute.peak_flops * compute.devices
    return compute.flops_per_sample * speed / peak if compute.flops_per_sample and peak and speed else None


def utilization_note(record: RunRecord) -> str:
    """Return a note on how the utilization is computed, or why it is unknown; empty if neither was recorded."""
    compute, value, speed = record.compute, utilization(record), mean_speed(record)
    if value is None or speed is None:
        problem = compute.problem or ("the run has too few steps" if compute.flops_per_sample else "")
        return f"Model FLOPs utilization: unknown, because {problem}." if problem else ""
    devices = f"{compute.devices} x " if compute.devices > 1 else ""
    return (
        f"Model FLOPs utilization: {value:.1%}. A sample requires {number(compute.flops_per_sample / 1e9)} GFLOP "
        "(matrix products and convolutions in the forward and backward passes, counted on the first batch); the run "
        f"processed {number(speed)} samples per second; the peak is {devices}{number(compute.peak_flops / 1e12)} "
        f"TFLOP/s ({compute.precision}, {compute.source})."
    )
