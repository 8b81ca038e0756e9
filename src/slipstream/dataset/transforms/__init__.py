"""Transforms: what happens to a sample before and after it reaches the device."""
