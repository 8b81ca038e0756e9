"""A folder in `sys.path` from which spawned worker processes import `mmengine`.

These processes inherit `sys.path`, but not the import finder that replaces `mmengine` in the main process.
"""
