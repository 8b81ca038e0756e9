"""A folder to add to `sys.path`.

Worker processes do not inherit the finder, so they import `super_gradients` from this folder.
"""
