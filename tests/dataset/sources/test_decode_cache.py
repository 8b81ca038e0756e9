from __future__ import annotations

import multiprocessing
import os
import signal
import warnings

import numpy as np
import pytest

from slipstream.dataset import DecodeCache

KEY = ("sample 1", "version 1")


def make_pair(seed=0, size=(37, 53)):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*size, 3), np.uint8), rng.integers(0, 19, size, np.uint8)


def must_not_load():
    raise AssertionError("a sample in the cache was decoded again")


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("size", [(1, 1), (37, 53), (64, 64), (1, 5000)])
def test_sample_is_decoded_once_per_folder(tmp_path, size):
    pair = make_pair(size=size)
    assert_same(DecodeCache(tmp_path / "c").get(KEY, lambda: pair), pair)
    again = DecodeCache(tmp_path / "c").get(KEY, must_not_load)
    assert_same(again, pair)
    for array in again:
        assert not array.flags.writeable
        assert array.flags.c_contiguous


def test_new_version_replaces_the_file_without_a_warning(tmp_path, recwarn):
    cache = DecodeCache(tmp_path)
    cache.get(KEY, lambda: make_pair(1))
    new = (KEY[0], "version 2")
    assert_same(cache.get(new, lambda: make_pair(2, size=(5, 6))), make_pair(2, size=(5, 6)))
    assert_same(cache.get(new, must_not_load), make_pair(2, size=(5, 6)))
    assert cache.read(KEY) is None
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1
    assert not recwarn


@pytest.mark.parametrize("part", ["magic", "header", "image", "padding", "mask"])
def test_flipped_bit_causes_a_warning_and_a_rewrite(tmp_path, part):
    image, mask = make_pair()
    cache = DecodeCache(tmp_path)
    cache.write(KEY, image, mask)
    path = cache.path(KEY[0])
    place = {"magic": 0, "header": 14, "image": 4096 + 2000, "padding": 4096 + image.nbytes + 1, "mask": -1}
    data = bytearray(path.read_bytes())
    data[place[part]] ^= 0x10
    path.write_bytes(data)
    fresh = DecodeCache(tmp_path)
    with pytest.warns(UserWarning, match=rf"{path.name}' is damaged"):
        assert_same(fresh.get(KEY, lambda: (image, mask)), (image, mask))
    assert_same(fresh.get(KEY, must_not_load), (image, mask))


def fail_to_replace(self, target):
    raise OSError(28, "No space left on device")


def test_full_disk_causes_one_warning(tmp_path, monkeypatch):
    cache = DecodeCache(tmp_path)
    cache.write(("kept", "1"), *make_pair(1))
    monkeypatch.setattr("pathlib.Path.replace", fail_to_replace)
    with pytest.warns(UserWarning, match=r"No space left on device.*Free disk space"):
        assert_same(cache.get(KEY, make_pair), make_pair())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(cache.get(KEY, make_pair), make_pair())
    assert_same(cache.get(("kept", "1"), must_not_load), make_pair(1))
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [cache.path("kept").name]


def fill(folder, start, samples, versions):
    warnings.simplefilter("error")
    cache = DecodeCache(folder)
    start.wait()
    for version in range(versions):
        for i in range(samples):
            expected = make_pair(100 * version + i, size=(64, 96))
            found = cache.get((str(i), str(version)), lambda expected=expected: expected)
            assert_same(found, expected)


def test_concurrent_writers_never_read_partial_files(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    workers = [context.Process(target=fill, args=(tmp_path, start, 12, 6)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    names = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert len(names) == 12
    cache = DecodeCache(tmp_path)
    for i in range(12):
        assert cache.read((str(i), "5")) is not None or cache.read((str(i), "4")) is not None


def write_and_stop_before_the_rename(folder, half_way):
    def stop(descriptor):
        half_way.set()
        signal.pause()

    os.fsync = stop
    DecodeCache(folder).write(KEY, *make_pair(1))


def test_killed_writer_leaves_the_old_file(tmp_path):
    cache = DecodeCache(tmp_path)
    cache.write((KEY[0], "version 0"), *make_pair(0))
    context = multiprocessing.get_context("fork")
    half_way = context.Event()
    writer = context.Process(target=write_and_stop_before_the_rename, args=(tmp_path, half_way))
    writer.start()
    assert half_way.wait(60)
    writer.kill()
    writer.join(60)
    assert_same(cache.read((KEY[0], "version 0")), make_pair(0))
    assert_same(cache.get(KEY, lambda: make_pair(1)), make_pair(1))
    assert_same(DecodeCache(tmp_path).get(KEY, must_not_load), make_pair(1))
