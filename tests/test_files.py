import os
import socketserver
import threading
from pathlib import Path

import pytest

from slipstream.files import (
    atomic_write,
    download,
    remove_temporary_files,
    write_text,
)


def test_old_file_is_kept_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path  # on the same file system, as a rename requires
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_old_file_remains_after_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_block_that_writes_nothing_raises_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.txt"):
        pass


def test_two_writers_of_one_file_do_not_conflict(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # this block ended last
    assert list(tmp_path.iterdir()) == [path]


def test_only_temporary_files_of_this_module_are_removed(tmp_path):
    temporary = tmp_path / ".epoch_1.pth.0123abcd.tmp"
    others = [tmp_path / name for name in (".notes.tmp", "epoch_1.pth.0123abcd.tmp", ".a.0123ABCD.tmp")]
    for path in (temporary, *others):
        path.write_text("")
    (tmp_path / ".folder.0123abcd.tmp").mkdir()
    remove_temporary_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / ".folder.0123abcd.tmp"])


def test_renamed_file_is_synced_before_its_folder(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert calls == [str(temporary), str(tmp_path)]


def test_text_is_written_unchanged_as_utf_8(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "a long text")
    write_text(path, "ü\r\n")
    assert path.read_bytes() == b"\xc3\xbc\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_utf_8_cannot_represent_is_written_only_if_it_may_be_replaced(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udcff")
    assert not list(tmp_path.iterdir())
    write_text(path, "\udcff", errors="replace")
    assert path.read_bytes() == b"?"


def test_a_download_from_a_server_without_http_raises_an_os_error(tmp_path):
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"220 ready\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(OSError, match=r"^the transfer failed: 220 ready"):
            download(f"http://127.0.0.1:{server.server_address[1]}/file", tmp_path / "file")
        thread.join()
