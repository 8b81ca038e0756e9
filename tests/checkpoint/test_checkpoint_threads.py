"""Test that `run_in_threads` runs each task once unless a task fails, and that no task is still running when it raises
an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.checkpoint.threads import run_in_threads


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_each_item_is_processed_once(pool, others, count):
    done = []
    run_in_threads(done.append, range(count), pool, others)
    assert sorted(done) == list(range(count))


def test_other_threads_process_items(pool):
    together = threading.Barrier(3, timeout=30)
    run_in_threads(lambda _: together.wait(), range(3), pool, 2)


def test_error_is_raised_after_all_threads_have_stopped(pool):
    started, failed, running = threading.Event(), threading.Event(), []

    def act(item):
        if item == 0:
            assert started.wait(30)
            failed.set()
            raise KeyError(item)
        running.append(item)
        started.set()
        assert failed.wait(30)
        running.remove(item)

    with pytest.raises(KeyError):
        run_in_threads(act, range(2), pool, 1)
    assert running == []


def test_error_in_another_thread_is_raised(pool):
    caller, here = threading.get_ident(), threading.Barrier(2, timeout=30)

    def act(_):
        here.wait()
        if threading.get_ident() != caller:
            raise KeyError

    with pytest.raises(KeyError):
        run_in_threads(act, range(2), pool, 1)
