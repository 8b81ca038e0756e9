"""Tests of `DeviceFeed`: order, random numbers and errors. Most tests use a mock copy stream."""

import importlib
import threading
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import slipstream
from slipstream.dataset import build_dataloader
from slipstream.dataset.loading.feed import DeviceFeed, can_draw_ahead, feed

module = importlib.import_module(
    "slipstream.dataset.loading.feed"
)  # the package exports a function with this name
Pair = namedtuple("Pair", ["image", "label"])


class CopyStream:
    """A copy stream that records the calls to `send` and `receive`."""

    def __init__(self):
        self.log = []

    def send(self, batch):
        self.log.append(("send", batch))
        return batch

    def receive(self, sent):
        self.log.append(("receive", sent))
        return sent


def fed(loader, prefetch=2):
    return DeviceFeed(loader, "cpu", prefetch, copy_stream=CopyStream())


def collect(seen, batches):
    for batch in batches:
        seen.append(batch)


def test_prefetch_batches_are_copied_ahead():
    batches = fed(range(6))
    used = []
    for batch in batches:
        sent = [b for what, b in batches._copy_stream.log if what == "send"]
        assert sent == list(range(min(batch + 3, 6)))
        used.append(batch)
    assert used == list(range(6))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_feed_keeps_order_and_length_and_can_be_iterated_again(length, prefetch):
    batches = fed(range(length), prefetch)
    assert len(batches) == length
    assert list(batches) == list(batches) == list(range(length))


def test_cpu_feed_returns_batches_unchanged_without_drawing_ahead():
    batch, drawn = {"x": torch.ones(2)}, []

    def loader():
        for index in range(3):
            drawn.append(index)
            yield batch

    iterator = iter(DeviceFeed(loader(), "cpu", 2))
    assert next(iterator) is batch
    assert drawn == [0]


class Noisy(Dataset):
    """A dataset that draws from the global generator."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(2) + index


@pytest.mark.parametrize("workers", [0, 1])
def test_feed_changes_neither_batches_nor_the_global_generator(workers):
    def epoch(wrap):
        loader = build_dataloader(
            dict(batch_size=4, dataset=Noisy(), num_workers=workers), 3, "train_dataloader", True
        )
        torch.manual_seed(5)
        values = []
        for batch in wrap(loader):
            values.append((batch, torch.randn(1)))  # a random number, as drawn by dropout
        return values, loader

    plain, loader = epoch(lambda loader: loader)
    ahead, _ = epoch(fed)
    assert can_draw_ahead(loader)
    for (batch, drawn), (batch2, drawn2) in zip(plain, ahead, strict=True):
        assert torch.equal(batch, batch2)
        assert torch.equal(drawn, drawn2)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.randn(2) for _ in range(8))


def test_can_draw_ahead_is_false_for_loaders_that_use_global_generators():
    assert not can_draw_ahead(DataLoader(Stream()))
    assert not can_draw_ahead([1, 2])
    assert can_draw_ahead(DataLoader(Stream(), num_workers=1))
    assert not can_draw_ahead(DataLoader(TensorDataset(torch.ones(3))))  # not built by build_dataloader


# ---- moving and pinning ------------------------------------------------------------------------------


def nested(tensor):
    return {"inputs": [tensor, (tensor, "name")], "pair": Pair(tensor, None), "count": 3}


def test_nested_tensors_move_and_keep_their_dtype():
    image = torch.zeros(2, 3, dtype=torch.uint8)
    moved = next(iter(feed([nested(image)], "meta")))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].label is None
    assert moved["inputs"][1][1] == "name"
    assert moved["count"] == 3
    for tensor in (moved["inputs"][0], moved["inputs"][1][0], moved["pair"].image):
        assert tensor.device.type == "meta"
        assert tensor.dtype == torch.uint8


@pytest.fixture
def pinning(monkeypatch):
    """Replace `_pin` with a mock that records the name of the calling thread."""
    threads = []

    def pin(batch):
        time.sleep(0.001)
        threads.append(threading.current_thread().name)
        if batch == "bad":
            raise RuntimeError("out of memory")
        return batch

    monkeypatch.setattr(module, "_pin", pin)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    return threads


def pinners():
    return [thread for thread in threading.enumerate() if thread.name.startswith("slipstream-pin")]


def test_pinning_thread_keeps_the_order_and_ends_with_the_iteration(pinning):
    assert list(module._pin_batches(iter(range(7)), torch.device("cuda:0"))) == list(range(7))
    assert len(pinning) == 7
    assert all(name.startswith("slipstream-pin") for name in pinning)
    assert pinners() == []


# ---- custom training loops --------------------------------------------------------------------------------


def test_loop_over_feed_matches_loop_over_the_loader():
    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = slipstream.accelerate(model, optimizer, torch.nn.functional.mse_loss, {})
        data = TensorDataset(torch.randn(10, 2), torch.randn(10, 1))
        batches = wrap(DataLoader(data, batch_size=4, shuffle=True))
        losses = [step(batch)["loss"] for _ in range(2) for _, batch in zip(range(3), batches, strict=False)]
        return torch.stack(losses), model.weight

    for found in (
        train(slipstream.feed),
        train(lambda loader: DeviceFeed(loader, "cpu", 2, copy_stream=CopyStream())),
    ):
        torch.testing.assert_close(found, train(lambda loader: loader), rtol=0, atol=0)
