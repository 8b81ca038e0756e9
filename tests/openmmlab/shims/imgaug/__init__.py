"""A replacement of imgaug for tests, which does not support NumPy 2: mmdetection imports it for one transform."""
