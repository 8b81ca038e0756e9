"""Ports for jobs of tests, which no other test and no connection of this machine takes meanwhile.

A port that the system calls free may be given to a connection before the job listens on it. It gives those from
32768 on, and Slipstream takes 20000 to 29999 under Slurm and MPI by itself.
"""

import itertools
import os
import socket

_numbers = itertools.count(os.getpid() % 1000)  # two runs of all tests begin at different places


def free_port():
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = (10000 + (8 * number + worker % 8) % 10000 for number in _numbers)
    return next(port for port in ports if _is_free(port))


def _is_free(port):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch: what a job left is no obstacle
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True
