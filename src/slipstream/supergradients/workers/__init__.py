"""A folder on the import path of worker processes.

These processes do not inherit the finder, so they import `super_gradients` from this folder.
"""
