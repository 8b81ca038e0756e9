"""A folder for `sys.path`: worker processes, which do not inherit the finder, import its `super_gradients`."""
