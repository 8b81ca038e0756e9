"""Datasets, each in its own module."""
