"""Select ports for distributed tests. No other test or connection uses these ports.

The ports are between 10000 and 19999. The operating system may assign a free port to a connection before the test's job
listens on it, but it assigns only ports from 32768 upwards. Under Slurm and MPI, Slipstream uses ports from 20000 to
29999.
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
        # torch also sets this option, to reuse ports in the TIME_WAIT state
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True
