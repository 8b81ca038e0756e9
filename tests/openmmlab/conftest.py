"""Import Slipstream as `mmengine` in the tests of this folder, which are not collected if MMEngine is not installed."""

from slipstream.errors import MissingPackageError

try:
    import slipstream.openmmlab  # noqa: F401
except MissingPackageError:
    collect_ignore_glob = ["test_*"]
