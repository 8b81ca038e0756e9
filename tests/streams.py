"""Datasets of MosaicML's `streaming` package, and a stand-in with the attributes that Slipstream reads."""

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

KINDS = ["stand-in", "package"]
COUNT = 22
SHARDS = 3


class StandIn(IterableDataset):
    """An iterable dataset with the interface of `streaming.StreamingDataset`."""

    def __init__(self, local, shuffle=False, replication=None, epoch_size=None, batch_size=None, ranks=2):
        self.ids = json.loads(Path(local, "ids.json").read_text())
        self.size, self.ranks = len(self.ids), ranks
        self.shuffle, self.replication = shuffle, replication
        self.streams = [SimpleNamespace(choose=epoch_size or self.size)]
        self.samples_per_stream = np.array([self.size])

    def __len__(self):
        return math.ceil(self.size / self.ranks)

    def __getitem__(self, index):
        return {"id": self.ids[index]}

    def __iter__(self):
        return map(self.__getitem__, range(self.size))


def use_package(kind):
    """Return the `StreamingDataset` class of a kind in `KINDS`. Skip the test if the package is not installed."""
    if kind == "package":
        return pytest.importorskip("streaming", reason="mosaicml-streaming is not installed").StreamingDataset
    sys.modules["streaming"] = module = ModuleType("streaming")
    module.StreamingDataset = StandIn
    return StandIn


def write_stream(folder, kind, count=COUNT):
    """Write a dataset of samples with the ids 0, 1, and so on. The package writes it as several shards."""
    if kind == "stand-in":
        folder.mkdir()
        (folder / "ids.json").write_text(json.dumps(list(range(count))))
        return folder
    from streaming import MDSWriter

    with MDSWriter(columns={"id": "int"}, out=str(folder), size_limit=250) as writer:
        for number in range(count):
            writer.write({"id": number})
    assert len(list(folder.glob("*.mds"))) >= SHARDS
    return folder


def augmented(kind):
    """Return a subclass whose samples, like those of many users, contain random numbers from the global generators."""

    class Augmented(kind):
        def __getitem__(self, index):
            number = super().__getitem__(index)["id"]
            noise = torch.rand(1) + np.random.rand() + random.random()
            return torch.tensor([number / COUNT]) + 0.1 * noise.float(), number

    return Augmented
