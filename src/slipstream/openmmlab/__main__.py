"""Run a script whose `import mmengine` imports Slipstream: `python -m slipstream.openmmlab tools/train.py CONFIG`.

Speed options come before the script: `python -m slipstream.openmmlab --speed compile=True tools/train.py CONFIG`.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from pathlib import Path

import slipstream.openmmlab  # makes `import mmengine` import Slipstream
from slipstream.errors import ConfigError
from slipstream.openmmlab.speed import VARIABLE, split_speed

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run a script with its arguments: `[--speed OPTION=VALUE ...] SCRIPT [ARGUMENTS]`.

    Raises:
        ConfigError: there is no such script, or a speed option is invalid.
    """
    slipstream.openmmlab.install()
    speed, arguments = split_speed(arguments)
    if speed:
        os.environ[VARIABLE] = shlex.join(speed)
    if not arguments or not Path(arguments[0]).is_file():
        what = f"'{arguments[0]}' is not a file" if arguments else "the script is missing"
        raise ConfigError(
            f"{what}; use python -m slipstream.openmmlab [--speed OPTION=VALUE ...] SCRIPT.py [ARGUMENTS]"
        )
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as if Python had started the script
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
