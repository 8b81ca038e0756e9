"""Transforms for samples, on the CPU and on the device."""
