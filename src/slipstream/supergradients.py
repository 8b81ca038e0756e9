"""Run SuperGradients scripts with Slipstream: importing this module makes `import super_gradients` import Slipstream.

Start a script with `python -m slipstream.supergradients SCRIPT.py`, or import this module before `super_gradients`.
"""

from __future__ import annotations

import sys

from slipstream.errors import ConfigError
from slipstream.import_alias import run_script
from slipstream.training.super_gradients import install

__all__ = ["install"]

install()

if __name__ == "__main__":
    try:
        run_script(sys.argv[1:], "python -m slipstream.supergradients", install)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
