"""`dict_from_file` and `list_from_file`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.fileio import dict_from_file, list_from_file

__all__ = ["dict_from_file", "list_from_file"]
