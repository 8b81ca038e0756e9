"""`python -m slipstream.supergradients SCRIPT.py`: run a script with Slipstream in place of `super_gradients`."""

from __future__ import annotations

import sys

import slipstream.supergradients  # makes `import super_gradients` import Slipstream
from slipstream.errors import ConfigError
from slipstream.import_alias import run_script

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]` with the other arguments.

    Raises:
        ConfigError: no script is given, or the file does not exist.
    """
    run_script(arguments, "python -m slipstream.supergradients", slipstream.supergradients.install)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
