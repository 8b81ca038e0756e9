"""Tests of the batch-size finder."""

import pytest
from fakes import Script

from slipstream.errors import SlipstreamError
from slipstream.tune import batch_size
from slipstream.tune.batch_size import search_batch_sizes
from slipstream.tune.process import TrialError

OUT = TrialError("out of memory", "full")


def find(
    fits=lambda size: True, max_batch_size=64, mib=lambda size: 100.0, seconds=lambda size: 0.1, rows=None
):
    def make_job(setting):
        size = setting.batch_size
        return Script(seconds(size), error=None if fits(size) else OUT, peak_mib=mib(size))

    return search_batch_sizes(make_job, max_batch_size, 60, (rows if rows is not None else []).append)


def test_limit_between_powers_of_two_is_found(fake_process):
    found = find(lambda size: size <= 27)
    assert 24 <= found.largest <= 27
    assert [row.batch_size for row in found.rows][:6] == [1, 2, 4, 8, 16, 32]


def test_fastest_batch_size_can_be_smaller_than_the_largest(fake_process):
    found = find(lambda size: size <= 16, seconds=lambda size: 0.1 if size <= 4 else 1.0)
    assert found.fastest == 4
    assert found.largest > 4
    assert "fastest: 4" in str(found)


def test_buffered_batches_are_not_timed_and_accumulation_cycles_are_complete(fake_process):
    search_batch_sizes(lambda setting: Script(buffered=6, accumulate=2), 1, 60, print)
    assert fake_process.requests == [(4, 7)]


def test_the_limit_itself_is_tried(fake_process):
    assert find(max_batch_size=24).largest == 24
    assert find(max_batch_size=1).largest == 1


def test_cpu_memory_bounds_the_size_before_it_is_tried(fake_process, monkeypatch):
    monkeypatch.setattr(batch_size, "available_mib", lambda: 1000.0)
    tried = []

    def mib(size):
        tried.append(size)
        return 500.0 + 100.0 * size

    found = find(mib=mib, max_batch_size=1024)
    assert max(tried) <= 10
    assert 8 <= found.largest <= 10
    assert any(row.status == "too large" and "1000 MiB is available" in row.reason for row in found.rows)


def test_out_of_memory_at_one_sample_raises_an_error(fake_process):
    with pytest.raises(SlipstreamError, match=r"batch size 1: out of memory: full"):
        find(lambda size: False)


def test_sizes_start_at_two_for_a_model_that_requires_two_samples(fake_process):
    def make_job(setting):
        return Script(
            error=TrialError("failed", "one value per channel") if setting.batch_size == 1 else None
        )

    assert search_batch_sizes(make_job, 4, 60, print).largest == 4


def test_rows_measured_before_an_interrupt_are_kept(fake_process):
    def make_job(setting):
        return Script(fail_when_timed=KeyboardInterrupt() if setting.batch_size == 4 else None)

    found = search_batch_sizes(make_job, 64, 60, print)
    assert (found.stopped, found.largest) == ("interrupted", 2)
