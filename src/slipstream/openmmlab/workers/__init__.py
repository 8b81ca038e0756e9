"""A folder to add to `sys.path`.

Worker processes do not inherit the import finder, so they import `mmengine` from this folder.
"""
