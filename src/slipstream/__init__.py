"""Slipstream: train PyTorch models faster without changing their code.

Public names are imported on first use, so that `import slipstream` costs next to nothing.
"""
