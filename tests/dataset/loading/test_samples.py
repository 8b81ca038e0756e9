"""Test that errors name the failing sample and that `skip_errors` replaces failing samples."""

import re
import traceback

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from slipstream.dataset.loading.loader import build_dataloader, set_epoch
from slipstream.dataset.loading.workers import _stop_workers, end_workers
from slipstream.errors import DataError


class Samples(Dataset):
    """Samples that contain their index and a random number. The samples in `faulty` raise `error`."""

    def __init__(self, faulty=(), error=ValueError, size=20):
        self.faulty, self.error, self.size = set(faulty), error, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.faulty:
            raise self.error("damaged")
        return int(index), torch.rand(()).item()


def build(dataset, seed=5, **options):
    options = dict(batch_size=4, sampler=dict(type="DefaultSampler", shuffle=False)) | options
    return build_dataloader(dict(dataset=dataset, **options), seed, "train_dataloader", training=True)


def content(loader, epoch=0, start=0):
    set_epoch(loader, epoch, start)
    batches = iter(loader)
    try:
        return [tuple(zip(*(part.tolist() for part in batch), strict=True)) for batch in batches]
    finally:
        if not loader.persistent_workers:
            _stop_workers(batches)  # otherwise, an error's traceback would keep the workers alive


def notes(error):
    """Return an error's traceback as text, including its notes. A worker process sends the notes only in this text."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [ValueError, OSError, DataError, KeyError])
def test_sample_error_keeps_its_type_and_names_the_sample(error, workers):
    loader = build(Samples([6], error), num_workers=workers)
    with pytest.raises(error, match="damaged") as caught:
        content(loader)
    assert "(sample 6 of Samples)" in notes(caught.value)
    if error is DataError:
        assert (str(caught.value), caught.value.__notes__) == ("damaged", ["(sample 6 of Samples)"])


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_a_sample_does_not_end_the_epoch(workers):
    loader = build(Samples([6], StopIteration), num_workers=workers)
    with pytest.raises(DataError, match=r"sample 6 of Samples raised StopIteration.*end the epoch early"):
        content(loader)


def test_collate_fn_error_names_the_samples_of_the_batch():
    def collate(samples):
        if samples[0][0] == 8:
            next(iter(()))
        return [torch.tensor([value for value, _ in samples])]

    with pytest.raises(DataError, match=r"batch of samples 8, 9, 10, 11 of Samples raised StopIteration"):
        list(build(Samples(), collate_fn=collate))


# ---- skip_errors -----------------------------------------------------------------------------------------------------


def test_replacement_depends_only_on_seed_epoch_and_index():
    faulty = [3, 4, 11]
    kept, wanted = build(Samples()), {}
    for epoch in (0, 1):
        wanted[epoch] = dict(sample for batch in content(kept, epoch) for sample in batch)
    one = build(Samples(faulty), skip_errors=3)
    two = build(Samples(faulty), skip_errors=3, num_workers=2, persistent_workers=True)
    replacements = {}
    for epoch in (0, 1):
        batches = content(one, epoch)
        assert content(two, epoch) == batches
        assert content(build(Samples(faulty), skip_errors=3), epoch, start=2) == batches[2:], (
            "resuming changed the batches"
        )
        read = [sample for batch in batches for sample in batch]
        for index, (found, draw) in enumerate(read):
            assert found not in faulty
            assert index in faulty or found == index
            assert draw == wanted[epoch][index], (
                "a failing sample, which draws no number, changed the numbers"
            )
        replacements[epoch] = [read[index][0] for index in faulty]
    assert replacements[0] != replacements[1]
    other = [s for batch in content(build(Samples(faulty), seed=6, skip_errors=3)) for s in batch]
    assert [other[index][0] for index in faulty] != replacements[0]
    end_workers(two)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_failing_samples_raise_an_error_that_names_the_last(workers):
    loader = build(Samples([3, 4, 11]), skip_errors=2, num_workers=workers)
    with pytest.raises(
        DataError, match=r"3 samples raised an error, more than skip_errors=2; .* 11 .* ValueError: damaged"
    ):
        content(loader)


def test_each_skipped_sample_is_logged_once_with_its_error(capsys):
    loader = build(Samples([2, 3]), skip_errors=2)
    content(loader)
    content(loader)
    lines = re.findall("Skipped sample .*", capsys.readouterr().err)
    assert lines == [f"Skipped sample {i} of Samples: ValueError: damaged" for i in (2, 3)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))
