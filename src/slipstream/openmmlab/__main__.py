"""Run a script in which `import mmengine` imports Slipstream: `python -m slipstream.openmmlab tools/train.py CONFIG`.

Speed options come before the script: `python -m slipstream.openmmlab --speed compile=True tools/train.py CONFIG`.
"""

from __future__ import annotations

import os
import shlex
import sys

import slipstream.openmmlab  # makes `import mmengine` import Slipstream
from slipstream.errors import ConfigError
from slipstream.import_alias import run_script
from slipstream.openmmlab.speed import VARIABLE, split_speed

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run a script with its arguments: `[--speed OPTION=VALUE ...] SCRIPT [ARGUMENTS]`.

    Raises:
        ConfigError: if the script does not exist, or a speed option is invalid.
    """
    speed, arguments = split_speed(arguments)
    if speed:
        os.environ[VARIABLE] = shlex.join(speed)
    run_script(
        arguments, "python -m slipstream.openmmlab [--speed OPTION=VALUE ...]", slipstream.openmmlab.install
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
