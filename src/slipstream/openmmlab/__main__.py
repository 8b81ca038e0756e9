"""Run a script whose `import mmengine` imports Slipstream: `python -m slipstream.openmmlab tools/train.py CONFIG`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import slipstream.openmmlab  # makes `import mmengine` import Slipstream
from slipstream.errors import ConfigError

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]` with the other arguments.

    Raises:
        ConfigError: there is no such script.
    """
    slipstream.openmmlab.install()
    if not arguments or not Path(arguments[0]).is_file():
        what = f"'{arguments[0]}' is not a file" if arguments else "the script is missing"
        raise ConfigError(f"{what}; use python -m slipstream.openmmlab SCRIPT.py [ARGUMENTS]")
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as if Python had started the script
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
