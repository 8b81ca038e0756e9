"""Tests of tar indexes: comparison with Python's `tarfile`, damaged archives, and the cache."""

import io
import os
import random
import tarfile

import pytest

from slipstream.dataset.sources import tar_index
from slipstream.dataset.sources.tar_index import TarShards
from slipstream.errors import DataError


def write(path, files, kind=tarfile.GNU_FORMAT, changes=None):
    with tarfile.open(path, "w", format=kind) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in changes or []:
            archive.addfile(info)
    return path


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def files(path, cache, extensions="jpg"):
    """Return the contents of the selected file of each sample."""
    shards = TarShards([path], {"file": extensions}, cache)
    return [shards.read(index, "file") for index in range(len(shards))]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_have_the_contents_that_were_written(tmp_path, kind):
    long = "folder/" * 20 + "x" * (40 if kind == tarfile.USTAR_FORMAT else 300)
    names = [f"{stem}.{e}" for stem in ("000", "a/001", long, "ü/002") for e in ("jpg", "seg.png", "cls")]
    written = [(name, os.urandom(i * 100)) for i, name in enumerate(names)]
    path = write(tmp_path / "a.tar", written, kind, [special("folder", tarfile.DIRTYPE)])
    for number, extension in enumerate(("jpg", "seg.png", "cls")):
        assert files(path, tmp_path / "cache", extension) == [data for _, data in written[number::3]]


def test_consecutive_files_with_the_same_key_form_a_sample(tmp_path):
    names = [
        "a/x.1.jpg",
        "a/x.cls",
        "a/x.SEG.png",
        "README",
        ".hidden.jpg",
        "a/._y.jpg",
        "b/x.cls",
        "b/x.JPG",
    ]
    path = write(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    assert files(path, tmp_path, "jpg;1.jpg") == [b"a/x.1.jpg", b"b/x.JPG"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_raise_an_error(tmp_path, kind):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1")], changes=[special("y.jpg", kind, "/etc/passwd")])
    with pytest.raises(DataError, match=r"'y\.jpg' in '.*' is a link or a special file"):
        files(path, tmp_path)


def test_damaged_header_raises_an_error_where_tarfile_ends_silently(tmp_path):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1"), ("y.jpg", b"2")])
    data = bytearray(path.read_bytes())
    data[1024 + 3] ^= 1  # in the name of the second file
    path.write_bytes(data)
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["x.jpg"]
    with pytest.raises(DataError, match=r"damaged or incomplete after byte 1,024"):
        files(path, tmp_path)


def test_data_after_the_end_of_an_archive_raises_an_error(tmp_path):
    one = write(tmp_path / "a.tar", [("x.jpg", b"1")]).read_bytes()
    (tmp_path / "b.tar").write_bytes(one + one)
    with pytest.raises(DataError, match=r"damaged or incomplete after byte 1,024"):
        files(tmp_path / "b.tar", tmp_path)


def test_incomplete_archive_raises_an_error_at_every_length(tmp_path):
    whole = write(tmp_path / "a.tar", [("x.jpg", bytes(700)), ("y.jpg", b"2")]).read_bytes()
    end = 512 + 1024 + 512 + 512  # the first block of zeros starts here
    for length in [0, 1, 511, 512, 1000, 1211, 1536, 1537, 2048, 2049, end - 1, end]:
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cut\.tar"):
            files(tmp_path / "cut.tar", tmp_path / "cache")
    (tmp_path / "cut.tar").write_bytes(whole[: end + 512])
    assert len(files(tmp_path / "cut.tar", tmp_path / "cache")) == 2


def test_random_damage_raises_a_data_error_or_keeps_all_positions_inside_the_file(tmp_path):
    rng = random.Random(0)
    written = [(f"{i}.{'n' * 120}", b"1" * i) for i in range(4)]
    whole = write(tmp_path / "a.tar", written, tarfile.PAX_FORMAT).read_bytes()
    errors = 0
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "b.tar").write_bytes(data)
        try:
            _, parts = tar_index._read_headers(tmp_path / "b.tar")
            assert ((parts >= 0).all(1) & (parts.sum(1) <= len(data))).all()
        except DataError:
            errors += 1
    assert 0 < errors < 200


# ---- the cache -------------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path):
    return write(tmp_path / "a.tar", [("x.jpg", b"1"), ("x.cls", b"22"), ("y.jpg", b"333")])


def test_headers_are_read_once(shard, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "user"))
    assert files(shard, None) == [b"1", b"333"]
    assert len(list((tmp_path / "user/tar_shards").iterdir())) == 1
    monkeypatch.setattr(tar_index, "_read_headers", None)
    assert files(shard, None) == [b"1", b"333"]


def test_changed_shard_is_read_again(shard, tmp_path):
    files(shard, tmp_path / "cache")
    write(shard, [("z.jpg", b"7"), ("x.cls", b"22"), ("x.jpg", b"8"), ("y.jpg", b"999")])
    assert files(shard, tmp_path / "cache") == [b"7", b"8", b"999"]


def test_damaged_index_is_created_again(shard, tmp_path):
    files(shard, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    data = path.read_bytes()
    for damaged in (b"", data[:100], data[:-40], b"\x80\x04K\x01."):
        path.write_bytes(damaged)
        assert files(shard, tmp_path / "cache") == [b"1", b"333"]
        assert path.read_bytes() != damaged
