"""Loaders: how samples become batches."""
