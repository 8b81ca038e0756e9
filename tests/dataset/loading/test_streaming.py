"""Tests of dataloaders with MosaicML's `StreamingDataset`: sample order, resuming and unsupported options."""

import contextlib
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.dataset import build_dataloader, set_epoch
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.preemption import Preempted
from streams import COUNT, KINDS, augmented, use_package, write_stream
from tiny_runs import run


@pytest.fixture
def package(request, monkeypatch):
    """Return the kind of package ("package" or "stand-in") and its `StreamingDataset` class."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "streaming", None)
    return request.param, use_package(request.param)


@pytest.fixture
def stream(package, tmp_path):
    """Return a function that opens a dataset whose samples have the ids 0, 1, ..."""
    kind, dataset = package
    folder = write_stream(tmp_path / "shards", kind)
    return lambda change=lambda kind: kind, **options: change(dataset)(local=str(folder), **options)


both = pytest.mark.parametrize("package", KINDS, indirect=True)
stand_in = pytest.mark.parametrize("package", KINDS[:1], indirect=True)


def ids(loader, epoch=0):
    set_epoch(loader, epoch)
    return [int(number) for batch in loader for number in batch["id"]]


def shuffled(seed):
    return torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_order_depends_only_on_seed_and_epoch(stream, workers):
    options = dict(dataset=stream(shuffle=True, batch_size=4), batch_size=4, num_workers=workers)
    loader = build_dataloader(options, seed=5, name="train_dataloader", training=True)
    assert [ids(loader, epoch) for epoch in (1, 0)] == [shuffled(6), shuffled(5)]
    set_epoch(loader, 1, start=3)
    assert [int(number) for batch in loader for number in batch["id"]] == shuffled(6)[12:]


@both
def test_data_loader_of_a_stream_is_read_by_index(stream):
    kind = getattr(sys.modules["streaming"], "StreamingDataLoader", DataLoader)
    ready = kind(stream(shuffle=True, batch_size=4), batch_size=4, drop_last=True)
    loader = build_dataloader(ready, seed=5, name="train_dataloader", training=True)
    assert len(loader) == COUNT // 4
    assert ids(loader) == shuffled(5)[: COUNT // 4 * 4]
    limited = dict(dataloader=ready, num_batch_per_epoch=2)
    assert ids(build_dataloader(limited, 5, "train_dataloader", True)) == shuffled(5)[:8]


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, x, number, mode):
        return {"loss": self.net(x).square().mean()}


class Record(Hook):
    def __init__(self, stop=None):
        self.stop, self.steps = stop, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.steps.append((runner.epoch, data_batch[1].tolist(), data_batch[0].flatten().tolist()))
        if len(self.steps) == self.stop:
            runner.save_checkpoint(runner.work_dir, "part.pth", by_epoch=False, mark_last=True)
            raise Preempted


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_run_resumes_in_the_middle_of_an_epoch(stream, tmp_path, workers):
    def part(folder, stop=None, **options):
        torch.manual_seed(0)
        record = Record(stop)
        dataset = stream(augmented, shuffle=True, batch_size=4)
        with contextlib.suppress(Preempted):
            run(
                tmp_path / folder,
                model=Net(),
                train_dataloader=dict(dataset=dataset, batch_size=4, num_workers=workers),
                train_cfg=dict(by_epoch=True, max_epochs=3),
                custom_hooks=[record],
                default_hooks=dict(preemption=None, checkpoint=None),
                **options,
            )
        return record.steps

    whole = part("whole")
    resumed = part("cut", stop=8) + part("cut", resume=True)
    assert resumed == whole
    for epoch in range(3):
        assert [i for number, batch, _ in resumed if number == epoch for i in batch] == shuffled(3 + epoch)
    assert len({value for *_, values in whole for value in values}) > COUNT  # noise differs between epochs


@both
def test_stream_that_repeats_samples_is_iterated_with_a_warning(stream, capfd):
    dataset = stream(epoch_size=2 * COUNT, batch_size=4)
    loader = build_dataloader(dict(dataset=dataset, batch_size=4), 0, "loader", True)
    assert isinstance(loader.dataset, IterableDataset)
    assert "`epoch_size`, or a stream's `proportion`, `repeat` or `choose`" in capfd.readouterr().err


@both
def test_configuration_can_name_the_dataset(package, tmp_path):
    folder = write_stream(tmp_path / "shards", package[0])
    options = dict(dataset=dict(type="StreamingDataset", local=str(folder), shuffle=True), batch_size=4)
    assert ids(build_dataloader(options, 5, "train_dataloader", True)) == shuffled(5)
