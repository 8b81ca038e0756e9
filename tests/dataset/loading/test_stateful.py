"""Tests of loaders that are not a `DataLoader`, and of loaders that save and restore their own position."""

import contextlib
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.dataset import build_dataloader
from slipstream.dataset.loading import stateful
from slipstream.errors import ConfigError
from slipstream.hooks import Hook
from tiny_runs import Net, Stop, StoppedError, run

EPOCH = 5


class Stream:
    """A loader whose batches cannot be drawn again: each pass continues where the previous one ended."""

    def __init__(self, first=0):
        self.position, self.used, self.drawn, self.restored = first, 0, 0, False

    def __len__(self):
        return EPOCH

    def __iter__(self):
        self.used, self.restored = self.used if self.restored else 0, False
        while self.used < EPOCH:
            self.position, self.used, self.drawn = self.position + 1, self.used + 1, self.drawn + 1
            yield torch.full((2, 4), float(self.position)), torch.tensor([0, 1])

    def state_dict(self):
        return {"position": self.position, "used": self.used}

    def load_state_dict(self, state):
        self.position, self.used, self.restored = state["position"], state["used"], True


class StatefulDataLoader(DataLoader):
    """A `DataLoader` with torchdata's protocol, over a stream of batches."""

    def __init__(self, stream):
        class Batches(IterableDataset):
            __iter__, __len__ = stream.__iter__, stream.__len__

        self.stream = stream
        super().__init__(Batches(), batch_size=None)

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


class Record(Hook):
    priority = "HIGHEST"

    def __init__(self):
        self.values = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.values[runner.iter + 1] = data_batch[0][0, 0].item()


def steps(folder, loader, stop=None, by_epoch=True, **options):
    record = Record()
    train_cfg = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=10)
    hooks = [record] if stop is None else [record, Stop(stop)]
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=1)
    with contextlib.suppress(StoppedError):
        run(
            folder, model=Net(), train_dataloader=loader, train_cfg=train_cfg, custom_hooks=hooks,
            default_hooks=dict(checkpoint=checkpoint), **options,
        )  # fmt: skip
    return record.values


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10])
@pytest.mark.parametrize("kind", [Stream, lambda: StatefulDataLoader(Stream())])
def test_a_run_resumes_at_the_position_of_the_loader(kind, stop, by_epoch, tmp_path):
    begin = steps(tmp_path, kind(), stop, by_epoch)
    assert begin == {step: step for step in range(1, stop + 1)}
    again = kind()
    rest = steps(tmp_path, again, by_epoch=by_epoch, resume=True, speed=dict(prefetch=2))
    assert rest == {step: step for step in range(stop + 1, 11)}
    assert getattr(again, "stream", again).drawn == 10 - stop


def test_with_several_processes_the_state_is_that_of_the_used_batches(monkeypatch):
    monkeypatch.setattr(stateful, "get_world_size", lambda: 2)
    stream = Stream()
    state = stateful.LoaderState(build_dataloader(stream, 0, "loader", True))
    batches = state.record(stream)
    next(batches)
    for used in range(1, EPOCH + 1):  # as in `until_one_ends`, the next batch is drawn before a batch is used
        next(batches, None)
        assert state.get(in_epoch=True) == {"position": used, "used": used}
    assert state.get(in_epoch=False) == {"position": EPOCH, "used": EPOCH}


def test_a_loader_of_another_library_has_its_own_attributes():
    stream = Stream()
    loader = build_dataloader(stream, 0, "loader", True)
    loader.dataset.position = 7
    assert (stream.position, loader.dataset.drawn, len(loader)) == (7, 0, EPOCH)
    assert [batch[0][0, 0].item() for batch in loader] == [8, 9, 10, 11, 12]
    with pytest.raises(ConfigError, match="must be a DataLoader, a dict or a list of batches"):
        build_dataloader(7, 0, "loader", True)


def test_another_number_of_processes_is_refused(tmp_path):
    steps(tmp_path, Stream(), 3)
    path = tmp_path / "iter_3.pth"
    saved = torch.load(path)
    saved["meta"]["sampler_generators"] *= 2
    torch.save(saved, path)
    with pytest.raises(Exception, match="positions of the data loaders of 2 processes, but this run has 1"):
        steps(tmp_path, Stream(), resume=str(path))


def test_webdataset_and_torchdata(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    with webdataset.TarWriter(str(tmp_path / "shard.tar")) as writer:
        for number in range(10):
            writer.write({"__key__": f"{number:02}", "cls": number})

    def read(sample):
        return torch.full((4,), float(sample["cls"])), sample["cls"] % 3

    def samples():
        data = webdataset.WebDataset(str(tmp_path / "shard.tar"), shardshuffle=False)
        return data.shuffle(8, rng=random.Random()).decode().map(read)

    for number, kind in enumerate((webdataset.WebLoader, torchdata.StatefulDataLoader, DataLoader)):
        whole = steps(tmp_path / f"{number}_whole", kind(samples(), batch_size=2))
        begin = steps(tmp_path / f"{number}_cut", kind(samples(), batch_size=2), 7)
        rest = steps(tmp_path / f"{number}_cut", kind(samples(), batch_size=2), resume=True)
        assert {**begin, **rest} == whole
        assert list(rest) == [8, 9, 10]
