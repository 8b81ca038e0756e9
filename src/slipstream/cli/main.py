"""The `slipstream` command: parse the arguments, run the command, and print errors on one line."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections.abc import Sequence

from slipstream.cli.parser import parse
from slipstream.cli.processes import announce, announce_preemption, enter_process, in_launch, is_first_failure
from slipstream.errors import ConfigError, SlipstreamError

# Exit status that a shell reports for a program terminated by SIGPIPE.
_SIGPIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit status: 2 for an invalid argument, 1 for a failed run."""
    start = time.monotonic()
    args = parse(argv)
    args.start = start  # the time limit of `tune` includes the imports
    # This must be set before torch loads OpenMP. With PASSIVE, waiting threads sleep instead of spinning. The setting
    # costs nothing on an idle machine, and training is several times faster if another program uses the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    enter_process()
    module, function = args.function.split(".")
    try:
        if os.environ.get("SLIPSTREAM_OPENMMLAB") == "1":
            importlib.import_module("slipstream.openmmlab")  # before the configuration imports a library
        status: int = getattr(importlib.import_module(f"slipstream.cli.{module}"), function)(args)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except SlipstreamError as error:
        return _fail(error, 1)
    except SystemExit as error:  # comes first, because `Interrupted` is also a KeyboardInterrupt
        announce_preemption(error)
        raise
    except KeyboardInterrupt:
        announce("interrupted")
        if not in_launch():
            print("interrupted; all written files are complete", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return _SIGPIPE
        if not in_launch():
            raise
        if is_first_failure():
            sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _is_stdout_closed() -> bool:
    """Return whether the reader of the output has closed the pipe, as in `slipstream recipes | head -1`."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poller.poll(0)):
        return False
    # Python flushes stdout again at exit, which would fail on the closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _fail(error: SlipstreamError, status: int) -> int:
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    announce(f"{type(error).__name__}: {text}")
    if is_first_failure():
        print(f"slipstream: error: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
