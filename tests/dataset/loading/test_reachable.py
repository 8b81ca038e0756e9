"""Tests that the random generators in a dataset, its transforms and its functions are seeded for each batch."""

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from slipstream.dataset import build_dataloader, set_epoch
from slipstream.dataset.loading.reachable import find_generators
from slipstream.dataset.loading.workers import Loading


class Draw:
    """A transform with own generators, as in Albumentations, which ignores the global generators."""

    def __init__(self, kind="numpy"):
        kinds = {
            "numpy": np.random.default_rng,
            "philox": lambda: np.random.Generator(np.random.Philox()),
            "python": random.Random,
            "legacy": np.random.RandomState,
            "torch": lambda: torch.Generator().manual_seed(torch.seed()),
        }
        self.generator = kinds[kind]()

    def __call__(self, value):
        if isinstance(self.generator, torch.Generator):
            return value + float(torch.rand((), generator=self.generator))
        return value + self.generator.random()


@dataclass(slots=True)
class DrawWithSlots:
    generator: np.random.Generator = field(default_factory=np.random.default_rng)

    def __call__(self, value):
        return value + self.generator.random()


GLOBAL = Draw()


class Samples(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(self.transform(float(index)), dtype=torch.float64)


class UsesGlobal(Samples):
    def __init__(self):
        super().__init__(None)

    def __getitem__(self, index):
        return torch.tensor(sum(GLOBAL(float(value)) for value in [index]), dtype=torch.float64)


class ClassAttribute(Samples):
    drawn = Draw()

    def __init__(self):
        super().__init__(None)

    def __getitem__(self, index):
        return torch.tensor(self.drawn(float(index)), dtype=torch.float64)


def closure():
    transform = Draw()
    return Samples(lambda value: transform(value))


DATASETS = {
    **{kind: lambda kind=kind: Samples(Draw(kind)) for kind in ("numpy", "philox", "python", "legacy", "torch")},
    "list": lambda: Samples(functools.partial(lambda parts, value: parts[1](parts[0](value)), [Draw(), Draw()])),
    "closure": closure,
    "slots": lambda: Samples(DrawWithSlots()),
    "method": lambda: Samples(Draw().__call__),
    "global": UsesGlobal,
    "class": ClassAttribute,
    "subset": lambda: Subset(Samples(Draw()), range(8)),
}  # fmt: skip


def values(dataset, epoch, workers=0, start=0):
    options = dict(num_workers=workers, multiprocessing_context="fork" if workers else None)
    loader = build_dataloader(dict(dataset=dataset, batch_size=2, **options), 3, "loader", True)
    set_epoch(loader, epoch, start)
    return torch.cat(list(Loading(loader, "loader", (3, epoch)))).tolist()


@pytest.mark.parametrize("name", DATASETS)
def test_random_numbers_depend_only_on_seed_epoch_and_batch(name):
    first = values(DATASETS[name](), 0)
    assert first == values(DATASETS[name](), 0, workers=2)
    assert first[4:] == values(DATASETS[name](), 0, start=2)
    later = values(DATASETS[name](), 1)
    assert not set(first) & set(later)
    assert len({round(value % 1, 12) for value in first + later}) == 16


def test_generators_of_two_transforms_draw_different_numbers():
    transforms = Draw(), Draw()
    drawn = Samples(lambda value: [transform(0) for transform in transforms])
    pairs = torch.tensor(values(drawn, 0))
    assert (pairs[:, 0] != pairs[:, 1]).all()


def test_the_state_outside_of_samples_is_unchanged():
    transform = Draw()
    transform.generator = np.random.default_rng(5)
    expected = np.random.default_rng(5).random(2)
    assert transform(0) == expected[0]
    values(Samples(transform), 0)
    assert transform(0) == expected[1]


class Stream(IterableDataset):
    def __init__(self):
        self.transform = Draw()

    def __iter__(self):
        yield from (torch.tensor(self.transform(index), dtype=torch.float64) for index in range(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_of_an_iterable_dataset_are_seeded_for_each_pass_and_worker(workers):
    first = values(Stream(), 0, workers)
    assert first == values(Stream(), 0, workers)
    assert not set(first) & set(values(Stream(), 1, workers))
    assert len(set(first)) == 4 * max(workers, 1)


def test_global_generators_and_those_of_libraries_are_not_searched():
    values = [
        torch.default_generator,
        np.random.mtrand._rand,
        random.SystemRandom(),
        torch,
        np.random,
        pytest,
    ]
    assert find_generators(values, np.linalg.norm, torch.nn.functional.dropout) == []


def test_albumentations():
    albumentations = pytest.importorskip("albumentations")
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)

    class Images(Dataset):
        def __init__(self):
            self.transform = albumentations.Compose(
                [
                    albumentations.RandomCrop(8, 8),
                    albumentations.OneOf([albumentations.GaussNoise(p=1)], p=0.5),
                ]
            )

        def __getitem__(self, index):
            return self.transform(image=images[index])["image"].copy()

        def __len__(self):
            return 4

    loaders = [build_dataloader(dict(dataset=Images(), batch_size=1), 0, "loader", True) for _ in range(2)]
    for batches in zip(*loaders, strict=True):
        assert torch.equal(*batches)
