"""The version of MMEngine whose interface this package provides. OpenMMLab libraries check this version."""

__all__ = ["__version__", "version_info"]

__version__ = "0.10.7"
version_info = (0, 10, 7)
