import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.logging import HistoryBuffer

ENTRIES = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100)),
    min_size=1,
    max_size=30,
)


@given(ENTRIES, st.one_of(st.none(), st.integers(1, 40)))
def test_statistics_match_numpy_over_the_newest_window(entries, window):
    history = HistoryBuffer()
    for value, count in entries:
        history.update(value, count)
    values, counts = (
        np.array(column, dtype=np.float64) for column in zip(*entries[-(window or 0) :], strict=True)
    )
    assert history.mean(window) == pytest.approx(np.average(values, weights=counts), rel=1e-9, abs=1e-6)
    assert history.min(window) == values.min()
    assert history.max(window) == values.max()
    assert history.current() == values[-1]


def test_oldest_entries_are_dropped_at_max_length():
    history = HistoryBuffer([1, 2, 3], [1, 1, 1], max_length=2)
    values, counts = history.data
    assert values.tolist() == [2, 3]
    assert counts.tolist() == [1, 1]
    assert len(history) == 2


def test_state_is_bounded_and_loads_with_weights_only():
    history = HistoryBuffer(range(3000), [2] * 3000)
    file = io.BytesIO()
    torch.save(history.state_dict(), file)
    file.seek(0)
    loaded = HistoryBuffer()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.data[0].tolist() == list(range(2000, 3000))
    assert loaded.mean(10) == history.mean(10)
    assert loaded.max_length == history.max_length


def test_registered_statistic_is_found_by_name(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, "_statistics", dict(HistoryBuffer._statistics))

    @HistoryBuffer.register_statistics
    def spread(history, window_size=None):
        return history.max(window_size) - history.min(window_size)

    history = HistoryBuffer([5, 1, 4], [1, 1, 1])
    assert history.statistics("spread") == 4
    assert history.statistics("spread", window_size=2) == 3
    assert history.statistics("mean", 2) == 2.5
