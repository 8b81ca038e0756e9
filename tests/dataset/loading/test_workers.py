"""Tests of the automatic selection of `num_workers` and `prefetch_factor`."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler, TensorDataset

from slipstream.dataset.loading import workers
from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.errors import ConfigError, DataError
from tiny_runs import Noisy, assert_same, loader, run, weights

# PyTorch warns if there are more workers than cores. These tests assume four cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_TRIAL_TIME", 0.15)
    monkeypatch.setattr(workers, "cores", lambda: 4)


class Sleeping(Dataset[Any]):
    """A dataset that sleeps for each sample, so workers run in parallel even on one core."""

    def __init__(self, seconds: float, size: int = 40) -> None:
        self.seconds, self.size = seconds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), int(index))


class Draws(Dataset[Any]):
    """A dataset that draws from the global generators and counts its reads. Its own generator, `rng`, is not used."""

    def __init__(self) -> None:
        self.reads, self.rng = 0, random.Random(0)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[float]:
        self.reads += 1
        return [int(index), random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)]


def build(dataset: Any, **options: Any) -> Any:
    cfg = dict(dataset=dataset, batch_size=4, collate_fn="default_collate", **options)
    return build_dataloader(cfg, 1, "train_dataloader", training=True)


def states() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()]


def test_one_worker_per_core_is_used_for_slow_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(workers, "print_log", lambda line, logger: lines.append(line))
    built = build(Sleeping(0.02), num_workers="auto")
    assert built.num_workers == 4
    (line,) = lines
    assert line.startswith("train_dataloader: a batch takes ")
    assert "num_workers=4 (limit 4; samples/s by number of workers: 0: " in line


def test_no_workers_are_used_if_loading_is_cheaper_than_transfer() -> None:
    built = build(
        TensorDataset(torch.arange(40.0), torch.arange(40)),
        num_workers="auto",
        prefetch_factor="auto",
        persistent_workers=True,
    )
    assert built.num_workers == 0
    assert len(list(built)) == 10


def test_explicit_numbers_skip_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Trials", None)
    assert build(Sleeping(0), num_workers=2).num_workers == 2
    assert build(Sleeping(0), num_workers=0, prefetch_factor="auto").prefetch_factor is None


def test_cores_are_divided_among_local_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "get_local_size", lambda: 2)
    assert build(Sleeping(0.02), num_workers="auto").num_workers == 2


def test_auto_changes_neither_samples_nor_generators() -> None:
    data, before = Draws(), states()
    chosen = build(data, num_workers="auto", prefetch_factor="auto", shuffle=True)
    assert states() == before
    assert (data.reads, data.rng.getstate()) == (0, random.Random(0).getstate())
    plain = build(Draws(), num_workers=0, shuffle=True)
    for epoch, start in ((0, 0), (1, 2)):
        for built in (chosen, plain):
            set_epoch(built, epoch, start)
        for one, other in zip(chosen, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_run_with_auto_workers_ends_with_the_same_weights(tmp_path: Path) -> None:
    measured = run(tmp_path / "a", train_dataloader=loader(Noisy(), num_workers="auto"))
    plain = run(tmp_path / "b", train_dataloader=loader(Noisy(), num_workers=0))
    assert_same(weights(measured), weights(plain))
    logs = "".join(path.read_text() for path in Path(measured.log_dir).glob("*.log"))
    assert "train_dataloader: a batch takes" in logs


def test_sample_errors_are_raised_unchanged() -> None:
    class Broken(Sleeping):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ValueError(f"no image {int(index)}")

    with pytest.raises(ValueError, match="no image"):
        build(Broken(0), num_workers="auto")


def test_auto_accepts_a_dataset_smaller_than_a_batch() -> None:
    cfg = dict(dataset=Sleeping(0, size=3), batch_size=4, drop_last=True, num_workers="auto")
    assert build_dataloader(cfg, 1, "val_dataloader", training=False).num_workers == 0
    with pytest.raises(DataError, match="less than batch_size=4"):
        build_dataloader(cfg, 1, "train_dataloader", training=True)


def test_auto_supports_a_custom_batch_sampler() -> None:
    batches = BatchSampler(SequentialSampler(range(40)), 5, False)
    cfg = dict(dataset=Sleeping(0.02), batch_sampler=batches, num_workers="auto")
    built = build_dataloader(cfg, 1, "val_dataloader", training=False)
    assert built.num_workers == 4
    assert [batch[0, 0].item() for batch in built] == list(range(0, 40, 5))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(("key", "least"), [("num_workers", 0), ("prefetch_factor", 1)])
@pytest.mark.parametrize("wrong", ["max", 1.5, -1])
def test_invalid_values_raise_errors(key: str, least: int, wrong: object) -> None:
    expected = f"train_dataloader.{key}: must be an integer from {least} to 1024, or 'auto', not {wrong!r}"
    with pytest.raises(ConfigError, match=expected):
        build(Sleeping(0), **{"num_workers": 1, key: wrong})
    with pytest.raises(
        ConfigError, match=f"train_dataloader.{key}: 'auto' is not supported for iterable datasets"
    ):
        build(Stream(), **{key: "auto"})


# ---- selection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "limit", "expected"),
    [
        ({0: 10, 1: 10, 2: 20, 4: 38, 8: 39}, 8, 4),  # 38 is within 5% of 39
        ({0: 10, 1: 9.9, 2: 10.1}, 8, 1),
        ({0: 10, 1: 9}, 1, 1),  # with one worker, the step does not wait for data
        ({0: 10, 1: 6, 2: 5}, 8, 0),
        ({0: 10, 1: 10, 2: 19}, 8, 4),  # the time limit is reached while more workers still help
        ({0: 10, 1: 10}, 8, 2),
    ],
)
def test_smallest_number_of_workers_within_five_percent_of_the_best_is_chosen(
    rates: dict[int, float], limit: int, expected: int
) -> None:
    assert workers._choose_num_workers(rates, limit) == expected


def test_trials_stop_when_more_workers_do_not_help_or_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = workers._Trials(Sleeping(0.02), {"collate_fn": torch.stack}, [[0, 1, 2, 3]])
    monkeypatch.setattr(trials, "_throughput", lambda count, chunk: min(count, 3) * 10.0)
    assert list(trials.rates(16)) == [0, 1, 2, 4, 8]
    assert list(trials.rates(3)) == [0, 1, 2, 3]
    monkeypatch.setattr(workers, "_TIME_LIMIT", -1.0)
    assert list(trials.rates(16)) == [0, 1]


@pytest.mark.parametrize(
    ("ratio", "max_batches", "expected"),
    [(1.0, 100, 2), (1.2, 100, 3), (2.5, 100, 4), (50.0, 100, 8), (2.5, 2.9, 2), (2.5, 0.1, 1)],
)
def test_prefetch_factor_covers_a_slow_batch_if_memory_allows(
    ratio: float, max_batches: float, expected: int
) -> None:
    assert workers._prefetch_factor(ratio, max_batches) == expected


def test_slowest_batch_ratio_decreases_with_batch_size() -> None:
    trials = workers._Trials(Sleeping(0.001), {"collate_fn": torch.stack}, [[0, 1, 2, 3]])
    trials.sample_seconds = [1.0, 1.0, 1.0, 5.0]
    assert trials.slowest_batch() == pytest.approx((3 * 2 + 5) / (4 * 2))
    trials.size = 1
    assert trials.slowest_batch() == pytest.approx(2.5)


def test_prefetch_factor_depends_on_the_variance_of_sample_times() -> None:
    class Uneven(Sleeping):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.03 if int(index) % 4 == 0 else 0.001)
            return torch.zeros(4)

    cfg = dict(
        dataset=Uneven(0), batch_size=1, num_workers=1, prefetch_factor="auto", collate_fn="default_collate"
    )
    assert build_dataloader(cfg, 1, "train_dataloader", training=True).prefetch_factor >= 4
