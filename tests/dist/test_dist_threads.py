"""Tests of `wait_for_gloo_threads` with Python threads that are named like gloo's threads."""

import hashlib
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.dist.threads import wait_for_gloo_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires glibc")


def as_gloo(function, *args):
    """Start a thread that is named like gloo's threads. Return the thread once it is running."""
    started = threading.Event()

    def run():
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        name = (task / "comm").read_text()
        (task / "comm").write_text("pt_gloo_runloop")
        started.set()
        function(*args)
        (task / "comm").write_text(name)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    return thread


def compute(done):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # hashing releases the GIL, as gloo does
    done.append(time.monotonic())


def test_wait_includes_busy_threads():
    done = []
    thread = as_gloo(compute, done)
    wait_for_gloo_threads(timeout=60)
    assert done
    thread.join()


def test_wait_includes_threads_that_repeatedly_acquire_the_gil():
    done = []

    def naps():
        for _ in range(50):
            time.sleep(0.005)
        done.append(True)

    thread = as_gloo(naps)
    wait_for_gloo_threads(timeout=60)
    assert done
    thread.join()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_wait_excludes_sleeping_threads(number):
    wake = threading.Event()
    threads = [as_gloo(wake.wait) for _ in range(number)]
    began = time.monotonic()
    wait_for_gloo_threads(timeout=60)
    assert time.monotonic() - began < 30
    wake.set()
    for thread in threads:
        thread.join()


def test_wait_ends_at_the_timeout():
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20))

    thread = as_gloo(spin)
    wait_for_gloo_threads(timeout=0.1)
    assert thread.is_alive()
    stop.set()
    thread.join()
