"""Transforms of samples, on the CPU and on the device."""
