"""Ports for distributed tests that no other test or connection uses.

The operating system may assign a free port to a connection before the test's job listens on it, but it assigns only
ports from 32768 on. Slipstream uses 20000 to 29999 under Slurm and MPI.
"""

import itertools
import os
import socket

_numbers = itertools.count(os.getpid() % 1000)  # parallel test runs start at different ports


def free_port():
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = (10000 + (8 * number + worker % 8) % 10000 for number in _numbers)
    return next(port for port in ports if _is_free(port))


def _is_free(port):
    with socket.socket() as sock:
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # torch also sets this option, to reuse ports in TIME_WAIT
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True
