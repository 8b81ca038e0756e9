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
from slipstream.dataset.loading.feed import DeviceFeed, can_draw_ahead, feed, read_prefetch
from slipstream.errors import ConfigError

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


def test_loader_without_length_raises_type_error():
    with pytest.raises(TypeError, match="no len"):
        len(fed(iter([1])))


def test_loader_error_is_raised_after_earlier_batches():
    def failing():
        yield from range(4)
        raise ValueError("sample 17 is broken")

    seen = []
    with pytest.raises(ValueError, match="sample 17 is broken"):
        collect(seen, fed(failing()))
    assert seen == [0, 1, 2, 3]


def test_early_break_closes_the_loader_and_the_next_pass_is_complete():
    closed = []

    class Loader:
        def __iter__(self):
            try:
                yield from range(9)
            finally:
                closed.append(True)

    batches = fed(Loader())
    for batch in batches:
        if batch == 2:
            break
    assert closed == [True]
    assert list(batches) == list(range(9))


def test_ahead_method_continues_an_iterator():
    loader = iter(range(9))
    assert next(loader) == 0
    assert list(fed(range(9)).move_batches(loader)) == list(range(1, 9))


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


def test_worker_error_is_raised():
    class Broken(Noisy):
        def __getitem__(self, index):
            if index == 13:
                raise ValueError("no such image")
            return super().__getitem__(index)

    seen, loader = [], DataLoader(Broken(), batch_size=4, num_workers=1)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="no such image"):
        collect(seen, fed(loader).move_batches(iterator))
    iterator._shutdown_workers()
    assert len(seen) == 3


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


def test_pinning_thread_ends_after_an_early_break(pinning):
    for batch in module._run_ahead(
        module._pin_batches(iter(range(9)), torch.device("cuda:0")), CopyStream(), 2
    ):
        if batch == 1:
            break
    assert pinners() == []


def test_pinning_thread_error_is_raised_after_earlier_batches(pinning):
    batches, seen = module._pin_batches(iter([0, 1, "bad", 3]), torch.device("cuda:0")), []
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(seen, module._run_ahead(batches, CopyStream(), 2))
    assert seen == [0, 1]
    assert pinners() == []


@pytest.mark.parametrize(("pin_memory", "threads"), [(True, 0), (False, 6)])
def test_batches_pinned_by_the_loader_are_not_pinned_again(pinning, monkeypatch, pin_memory, threads):
    class Loader(list):
        pass

    loader = Loader(range(6))
    loader.pin_memory = pin_memory
    batches = DeviceFeed(loader, "cuda:0", copy_stream=CopyStream())
    assert list(batches) == list(range(6))
    assert len(pinning) == threads


@pytest.mark.parametrize(("value", "count"), [(None, 0), (False, 0), (True, 2), (0, 0), (3, 3)])
def test_read_prefetch_accepts_bools_and_numbers(value, count):
    assert read_prefetch(value) == count


@pytest.mark.parametrize("value", [-1, "2", 1.5])
def test_read_prefetch_error_names_the_key(value):
    with pytest.raises(ConfigError, match="prefetch: must be a number of batches"):
        read_prefetch(value)


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


def test_length_matches_the_loader():
    loader = DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)
    assert len(slipstream.feed(loader)) == len(loader) == 3


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.ones(1, 4).expand(3, 4), torch.ones(2, 3).T], ids=str
)
def test_tensors_of_all_layouts_are_pinned(tensor, monkeypatch):
    """`pin_memory` keeps the strides of a tensor, so its copy fails if elements share memory."""
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda t: t if t.is_sparse else torch.empty_strided(t.shape, t.stride()).copy_(t),
    )
    assert torch.equal(module._pin(tensor).to_dense(), tensor.to_dense())
