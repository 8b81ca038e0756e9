"""A folder in `sys.path` from which spawned worker processes import `super_gradients`.

These processes inherit `sys.path`, but not the import finder that replaces `super_gradients` in the main process.
"""
