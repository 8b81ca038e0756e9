"""Batches ahead on the device: the loader's own order, draws and errors, with a stand-in for streams."""

import importlib
import threading
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import slipstream
from slipstream.dataset import build_dataloader
from slipstream.dataset.loading.feed import DeviceFeed, draws_apart, feed, read_prefetch
from slipstream.errors import ConfigError

module = importlib.import_module("slipstream.dataset.loading.feed")  # its function has the same name
Pair = namedtuple("Pair", ["image", "label"])


class CopyStream:
    """Records what travels; a batch is on the device once it was received."""

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


def put(seen, batches):
    for batch in batches:
        seen.append(batch)


def test_the_copies_of_prefetch_batches_have_begun_when_a_batch_is_handed_out():
    batches = fed(range(6))
    used = []
    for batch in batches:
        sent = [b for what, b in batches._copy_stream.log if what == "send"]
        assert sent == list(range(min(batch + 3, 6)))
        used.append(batch)
    assert used == list(range(6))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_order_and_number_are_the_loaders_and_it_can_be_iterated_again(length, prefetch):
    batches = fed(range(length), prefetch)
    assert len(batches) == length
    assert list(batches) == list(batches) == list(range(length))


def test_what_has_no_length_says_so():
    with pytest.raises(TypeError, match="no len"):
        len(fed(iter([1])))


def test_an_error_of_the_loader_comes_after_the_batches_before_it():
    def failing():
        yield from range(4)
        raise ValueError("sample 17 is broken")

    seen = []
    with pytest.raises(ValueError, match="sample 17 is broken"):
        put(seen, fed(failing()))
    assert seen == [0, 1, 2, 3]


def test_an_early_break_leaves_nothing_behind_and_the_next_pass_is_whole():
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


def test_a_pass_that_has_begun_goes_on():
    loader = iter(range(9))
    assert next(loader) == 0
    assert list(fed(range(9)).ahead(loader)) == list(range(1, 9))


def test_the_cpu_hands_batches_through_and_draws_nothing_ahead():
    batch, drawn = {"x": torch.ones(2)}, []

    def loader():
        for index in range(3):
            drawn.append(index)
            yield batch

    iterator = iter(DeviceFeed(loader(), "cpu", 2))
    assert next(iterator) is batch
    assert drawn == [0]


class Noisy(Dataset):
    """Draws from the global generator."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(2) + index


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_and_the_global_generator_are_as_without_it(workers):
    def epoch(wrap):
        loader = build_dataloader(
            dict(batch_size=4, dataset=Noisy(), num_workers=workers), 3, "train_dataloader", True
        )
        torch.manual_seed(5)
        values = []
        for batch in wrap(loader):
            values.append((batch, torch.randn(1)))  # what dropout would draw
        return values, loader

    plain, loader = epoch(lambda loader: loader)
    ahead, _ = epoch(fed)
    assert draws_apart(loader)
    for (batch, drawn), (batch2, drawn2) in zip(plain, ahead, strict=True):
        assert torch.equal(batch, batch2)
        assert torch.equal(drawn, drawn2)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.randn(2) for _ in range(8))


def test_a_stream_that_may_draw_from_the_global_generators_is_known():
    assert not draws_apart(DataLoader(Stream()))
    assert not draws_apart([1, 2])
    assert draws_apart(DataLoader(Stream(), num_workers=1))
    assert not draws_apart(DataLoader(TensorDataset(torch.ones(3))))  # not one of ours


def test_a_failing_worker_is_heard():
    class Broken(Noisy):
        def __getitem__(self, index):
            if index == 13:
                raise ValueError("no such image")
            return super().__getitem__(index)

    seen, loader = [], DataLoader(Broken(), batch_size=4, num_workers=1)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="no such image"):
        put(seen, fed(loader).ahead(iterator))
    iterator._shutdown_workers()
    assert len(seen) == 3


# ---- moving and pinning ------------------------------------------------------------------------------


def nested(tensor):
    return {"inputs": [tensor, (tensor, "name")], "pair": Pair(tensor, None), "count": 3}


def test_tensors_move_wherever_they_are_nested_and_keep_their_dtype():
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
    """Pinning without an accelerator: it takes a while, and leaves a mark on which thread it ran."""
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


def test_a_thread_pins_in_order_and_ends_with_the_pass(pinning):
    assert list(module._pinned(iter(range(7)), torch.device("cuda:0"))) == list(range(7))
    assert len(pinning) == 7
    assert all(name.startswith("slipstream-pin") for name in pinning)
    assert pinners() == []


def test_the_thread_ends_with_a_pass_that_is_left(pinning):
    for batch in module._run_ahead(module._pinned(iter(range(9)), torch.device("cuda:0")), CopyStream(), 2):
        if batch == 1:
            break
    assert pinners() == []


def test_an_error_in_the_thread_is_heard_after_the_batches_before_it(pinning):
    batches, seen = module._pinned(iter([0, 1, "bad", 3]), torch.device("cuda:0")), []
    with pytest.raises(RuntimeError, match="out of memory"):
        put(seen, module._run_ahead(batches, CopyStream(), 2))
    assert seen == [0, 1]
    assert pinners() == []


@pytest.mark.parametrize(("pin_memory", "threads"), [(True, 0), (False, 6)])
def test_only_what_the_loader_does_not_pin_is_pinned(pinning, monkeypatch, pin_memory, threads):
    class Loader(list):
        pass

    loader = Loader(range(6))
    loader.pin_memory = pin_memory
    batches = DeviceFeed(loader, "cuda:0", copy_stream=CopyStream())
    assert list(batches) == list(range(6))
    assert len(pinning) == threads


@pytest.mark.parametrize(("value", "count"), [(None, 0), (False, 0), (True, 2), (0, 0), (3, 3)])
def test_words_are_read(value, count):
    assert read_prefetch(value) == count


@pytest.mark.parametrize("value", [-1, "2", 1.5])
def test_wrong_words_are_named_with_their_place(value):
    with pytest.raises(ConfigError, match="prefetch: must be a number of batches"):
        read_prefetch(value)


# ---- for a loop of one's own ------------------------------------------------------------------------------


def test_a_loop_over_feed_trains_as_one_over_the_loader():
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


def test_the_length_of_an_epoch_is_the_loaders():
    loader = DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)
    assert len(slipstream.feed(loader)) == len(loader) == 3
