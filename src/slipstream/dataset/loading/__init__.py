"""Data loaders, samplers and collate functions."""
