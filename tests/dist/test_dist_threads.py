"""The wait for gloo's threads at the end, on threads of Python that go by their name."""

import hashlib
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.dist.threads import rest_gloo_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone aborts")


def as_gloo(function, *args):
    """Start a thread that bears the name of gloo's; return it when it has begun."""
    begun = threading.Event()

    def run():
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        name = (task / "comm").read_text()
        (task / "comm").write_text("pt_gloo_runloop")
        begun.set()
        function(*args)
        (task / "comm").write_text(name)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    return thread


def compute(done):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # without Python's lock, as gloo
    done.append(time.monotonic())


def test_a_thread_that_works_is_waited_for():
    done = []
    thread = as_gloo(compute, done)
    rest_gloo_threads(patience=60)
    assert done
    thread.join()


def test_a_thread_that_comes_for_pythons_lock_again_and_again_is_waited_for():
    done = []

    def naps():
        for _ in range(50):
            time.sleep(0.005)
        done.append(True)

    thread = as_gloo(naps)
    rest_gloo_threads(patience=60)
    assert done
    thread.join()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_threads_that_sleep_hold_nobody_up(number):
    wake = threading.Event()
    threads = [as_gloo(wake.wait) for _ in range(number)]
    began = time.monotonic()
    rest_gloo_threads(patience=60)
    assert time.monotonic() - began < 30
    wake.set()
    for thread in threads:
        thread.join()


def test_patience_ends():
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20))

    thread = as_gloo(spin)
    rest_gloo_threads(patience=0.1)
    assert thread.is_alive()
    stop.set()
    thread.join()
