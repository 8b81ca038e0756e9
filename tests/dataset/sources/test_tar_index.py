"""Tests of tar file indexes: comparison with Python's `tarfile`, damaged and malicious archives, and the cache."""

import io
import os
import random
import tarfile

import numpy as np
import pytest

from slipstream.dataset.sources import tar_index
from slipstream.dataset.sources.tar_headers import tar_members
from slipstream.dataset.sources.tar_index import shard_index
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


def repaired(header):
    """Return the header with a correct checksum."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:512])
    return header[:148] + b"%06o\0 " % total + header[156:]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_listed_files_match_those_of_tarfile(tmp_path, kind):
    long = "folder/" * 20 + "x" * (40 if kind == tarfile.USTAR_FORMAT else 300)
    names = [f"{stem}.{e}" for stem in ("000", "a/001", long, "ü/002") for e in ("jpg", "seg.png", "cls")]
    files = [(name, os.urandom(i * 100)) for i, name in enumerate(names)]
    path = write(tmp_path / "a.tar", files, kind, [special("folder", tarfile.DIRTYPE)])
    with tarfile.open(path) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive if m.isreg()]
    assert [tuple(member) for member in tar_members(path)] == expected
    assert [name for name, _, _ in expected] == names


def test_attributes_of_pax_headers_replace_name_and_size(tmp_path):
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}
    ) as archive:
        for name in ("n" * 200 + ".bin", "short.bin"):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 700, {"mtime": "1.5", "size": "700"}
            archive.addfile(info, io.BytesIO(bytes(700)))
    assert [(m.name, m.size) for m in tar_members(tmp_path / "a.tar")] == [
        ("n" * 200 + ".bin", 700),
        ("short.bin", 700),
    ]


def test_consecutive_files_with_the_same_key_form_a_sample(tmp_path):
    names = [
        "a/x.1.jpg",
        "a/x.cls",
        "a/x.SEG.png",
        "b/x.jpg",
        "README",
        ".hidden.jpg",
        "a/._y.jpg",
        "y.d/z.json",
    ]
    index = shard_index(write(tmp_path / "a.tar", [(name, b"") for name in names]), tmp_path)
    assert index.keys == ["a/x", "b/x", "y.d/z"]
    assert [index.sample_extensions(sample) for sample in range(3)] == [
        ["1.jpg", "cls", "seg.png"],
        ["jpg"],
        ["json"],
    ]


def test_two_files_with_the_same_extension_raise_an_error(tmp_path):
    path = write(tmp_path / "a.tar", [("x.jpg", b""), ("x.cls", b""), ("x.JPG", b"")])
    with pytest.raises(DataError, match=r"'x' in '.*a\.tar' has two files with the extension 'JPG'"):
        shard_index(path, tmp_path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tarfile.SYMTYPE, "is a symbolic link, and links are not followed"),
        (tarfile.LNKTYPE, "is a hard link"),
        (tarfile.CHRTYPE, "is not a regular file"),
        (tarfile.FIFOTYPE, "is not a regular file"),
        (tarfile.GNUTYPE_SPARSE, "is not a regular file"),
    ],
)
def test_links_and_devices_raise_an_error(tmp_path, kind, expected):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1")], changes=[special("y.jpg", kind, "/etc/passwd")])
    with pytest.raises(DataError, match=rf"'y\.jpg' in '.*' {expected}"):
        list(tar_members(path))


def test_sparse_file_in_pax_format_raises_an_error(tmp_path):
    info = tarfile.TarInfo("x.bin")
    info.pax_headers = {"GNU.sparse.major": "1"}
    path = write(tmp_path / "a.tar", [], tarfile.PAX_FORMAT, [info])
    with pytest.raises(DataError, match="sparse file"):
        list(tar_members(path))


def test_damaged_header_raises_an_error_where_tarfile_ends_silently(tmp_path):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1"), ("y.jpg", b"2")])
    data = bytearray(path.read_bytes())
    data[1024 + 3] ^= 1  # in the name of the second file
    path.write_bytes(data)
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["x.jpg"]
    with pytest.raises(DataError, match=r"the header at byte 1,024 has a wrong checksum"):
        list(tar_members(path))


def test_data_after_the_end_of_an_archive_raises_an_error(tmp_path):
    one = write(tmp_path / "a.tar", [("x.jpg", b"1")]).read_bytes()
    path = tmp_path / "b.tar"
    path.write_bytes(one + one)
    with pytest.raises(DataError, match=r"contains data after the end of the archive at byte 1,024"):
        list(tar_members(path))
    path.write_bytes(bytes(512) + one[512:])  # the first header was not written
    with pytest.raises(DataError, match=r"contains data after the end of the archive at byte 0"):
        list(tar_members(path))


def test_many_zeros_at_the_end_cause_a_warning(tmp_path):
    path = write(tmp_path / "a.tar", [("x.jpg", bytes(30_000)), ("y.jpg", b"2")])
    path.write_bytes(path.read_bytes() + bytes(10_240))
    with pytest.warns(UserWarning, match="zero bytes, more than normal padding"):
        assert len(list(tar_members(path))) == 2


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (b"77777777777\0", "'x.jpg' has 8,589,934,591 bytes, but the archive ends after"),
        (b"\x80" + bytes(3) + b"\xff" * 8, "but the archive ends after"),
        (b"\xff" * 12, "invalid size"),
        (b"-0000000001\0", "invalid size"),
        (b"12x\0" + bytes(8), "invalid size"),
    ],
)
def test_invalid_size_raises_an_error(tmp_path, size, expected):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1")])
    data = path.read_bytes()
    path.write_bytes(repaired(data[:124] + size + data[136:512]) + data[512:])
    with pytest.raises(DataError, match=expected):
        list(tar_members(path))


def test_huge_extended_header_is_not_read(tmp_path):
    path = write(tmp_path / "a.tar", [("x.jpg", b"1")])
    data = path.read_bytes()
    header = repaired(data[:124] + b"%011o\0" % (2**30) + data[136:156] + b"L" + data[157:512])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(2**30 + 4096)  # a sparse file
    with pytest.raises(DataError, match="extended header of 1,073,741,824 bytes"):
        list(tar_members(path))


@pytest.mark.parametrize(
    "content", [b"99 path=x\n", b"path=x\n", b"12 pathx\n", b"0 path=x\n", b"-5 path=x\n", b"\xff"]
)
def test_invalid_extended_header_raises_an_error(tmp_path, content):
    path = write(tmp_path / "a.tar", [("x", content), ("y.jpg", b"1")])
    data = path.read_bytes()
    path.write_bytes(repaired(data[:156] + b"x" + data[157:512]) + data[512:])
    with pytest.raises(DataError, match=r"the extended header at byte 512 is invalid"):
        list(tar_members(path))


def test_incomplete_archive_raises_an_error_at_every_length(tmp_path):
    whole = write(tmp_path / "a.tar", [("x.jpg", bytes(700)), ("y.jpg", b"2")]).read_bytes()
    end = 512 + 1024 + 512 + 512  # the first block of zeros starts here
    for length in [0, 1, 511, 512, 1000, 1211, 1536, 1537, 2048, 2049, end - 1, end, end + 511]:
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"is incomplete|is not a tar archive"):
            list(tar_members(tmp_path / "cut.tar"))
    (tmp_path / "cut.tar").write_bytes(whole[: end + 512])
    assert len(list(tar_members(tmp_path / "cut.tar"))) == 2


def test_compressed_archive_and_other_files_raise_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("x.bin")
        info.size = 4096
        archive.addfile(info, io.BytesIO(os.urandom(4096)))
    with pytest.raises(DataError, match="is not an uncompressed tar archive"):
        list(tar_members(tmp_path / "a.tar.gz"))
    with pytest.raises(DataError, match=r"cannot read '.*missing\.tar'"):
        shard_index(tmp_path / "missing.tar", tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        list(tar_members(tmp_path))


def test_random_damage_never_raises_an_unexpected_error(tmp_path):
    rng = random.Random(0)
    whole = write(
        tmp_path / "a.tar", [(f"{i}.{'n' * 120}", b"1" * i) for i in range(4)], tarfile.PAX_FORMAT
    ).read_bytes()
    errors = 0
    for _ in range(300):
        data = bytearray(whole)
        at = rng.randrange(len(data) // 512) * 512
        data[at + rng.randrange(512)] = rng.randrange(256)
        if rng.random() < 0.7:
            data[at : at + 512] = repaired(bytes(data[at : at + 512]))
        (tmp_path / "b.tar").write_bytes(data)
        try:
            for member in tar_members(tmp_path / "b.tar"):
                assert 0 <= member.offset <= member.offset + member.size <= len(data)
        except DataError:
            errors += 1
    assert 0 < errors < 300


# ---- the cache -------------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path):
    return write(tmp_path / "a.tar", [("x.jpg", b"1"), ("x.cls", b"22"), ("y.jpg", b"333")])


def equal(left, right):
    return (left.keys, left.extensions) == (right.keys, right.extensions) and np.array_equal(
        left.parts, right.parts
    )


def must_not_read(path):
    raise AssertionError(f"{path} was read again, although its index is cached")


def test_headers_are_read_once(shard, tmp_path, monkeypatch):
    first = shard_index(shard, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npz"]
    monkeypatch.setattr(tar_index, "tar_members", must_not_read)
    assert equal(shard_index(shard, tmp_path / "cache"), first)


def test_default_folder_is_in_the_users_cache(shard, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "user"))
    shard_index(shard)
    assert len(list((tmp_path / "user/tar_shards").iterdir())) == 1


def test_changed_shard_is_read_again(shard, tmp_path):
    shard_index(shard, tmp_path / "cache")
    write(shard, [("z.jpg", b"1"), ("x.cls", b"22"), ("y.jpg", b"333")])
    os.utime(shard, ns=(1, 1))
    assert shard_index(shard, tmp_path / "cache").keys == ["z", "x", "y"]


def test_damaged_index_is_created_again(shard, tmp_path):
    whole = shard_index(shard, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    data = path.read_bytes()
    for damaged in (b"", data[:100], data[:-40], data.replace(b"jpg", b"gif"), b"\x80\x04K\x01."):
        path.write_bytes(damaged)
        assert equal(shard_index(shard, tmp_path / "cache"), whole)
        assert path.read_bytes() != damaged


@pytest.mark.parametrize("change", [(0, 2, 10**9), (0, 0, 99), (0, 1, -1), (2, 3, 2**62)])
def test_index_with_positions_outside_the_shard_is_created_again(shard, tmp_path, change):
    whole = shard_index(shard, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    with np.load(path) as file:
        arrays = dict(file)
    row, column, value = change
    arrays["parts"][row, column] = value
    np.savez(path, **arrays)
    assert equal(shard_index(shard, tmp_path / "cache"), whole)


def test_unwritable_folder_causes_a_warning(shard, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot write to the cache"):
        assert shard_index(shard, tmp_path / "file/cache").keys == ["x", "y"]
