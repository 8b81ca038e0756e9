"""A replacement for imgaug, which does not support NumPy 2. mmdetection imports it for one transform."""
