import errno
import io
import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from recurra._files.writing import locked
from recurra.data._files import Cache

KEY = {"source": "digest", "type": "<u2"}


class Writer:
    """Writes the same content each time and counts how often it was asked to."""

    def __init__(self, content=b"content"):
        self.content = content
        self.calls = 0

    def __call__(self, out):
        self.calls += 1
        out.write(self.content)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def test_an_entry_is_made_once_and_kept_in_the_users_folder(corpus, user_cache):
    write = Writer()
    paths = [Cache(corpus).get("train", KEY, write) for _ in range(2)]
    assert write.calls == 1
    assert paths[0] == paths[1]
    assert paths[0].parent == Cache(corpus).folder
    assert paths[0].parent.parent == user_cache / "recurra"
    assert list(corpus.iterdir()) == []
    assert paths[0].read_bytes() == b"content"
    header = json.loads(paths[0].with_suffix(".json").read_text())
    assert (header["made_from"], header["bytes"]) == (KEY, 7)
    assert len(list(paths[0].parent.glob("[!.]*"))) == 2
    assert [path.name for path in paths[0].parent.glob(".*")] == [".lock"], "no temporary file is left"


def damage_header(**changes):
    def damage(path):
        header = path.with_suffix(".json")
        header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"conten"),
        lambda path: path.write_bytes(b"Content"),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_bytes(b"{"),
        damage_header(format=0),
        damage_header(made_from={**KEY, "source": "another"}),
    ],
)
def test_a_bad_entry_is_made_anew(corpus, damage):
    path = Cache(corpus).get("train", KEY, Writer())
    damage(path)
    write = Writer()
    assert Cache(corpus).get("train", KEY, write).read_bytes() == b"content"
    assert write.calls == 1
    assert Cache(corpus).get("train", KEY, write) == path
    assert write.calls == 1


def test_a_writer_that_fails_leaves_no_entry(corpus):
    def fail(out):
        out.write(b"half")
        raise OSError("no more")

    with pytest.raises(OSError, match=r"^no more$"):
        Cache(corpus).get("train", KEY, fail)
    assert [path.name for path in Cache(corpus).folder.iterdir()] == [".lock"]
    assert Cache(corpus).get("train", KEY, Writer()).read_bytes() == b"content"


def test_what_killed_processes_left_is_removed_and_nothing_else(corpus):
    folder = Cache(corpus).get("train", KEY, Writer()).parent
    left = [folder / f".{name}.0123456789abcdef.tmp" for name in ("test-0123456789abcdef.bin", "summary.json")]
    for path in left:
        path.touch()
    Cache(corpus).get("train", KEY, Writer())
    assert all(path.exists() for path in left)  # nothing is made, so nothing is cleared up: the folder may be read-only
    Cache(corpus).get("valid", KEY, Writer())
    assert [path.exists() for path in left] == [False, True]


class Heard(io.StringIO):
    """A standard error that tells another thread when a line was written."""

    def __init__(self):
        super().__init__()
        self.line = threading.Event()

    def write(self, text):
        written = super().write(text)
        if text.endswith("\n"):
            self.line.set()
        return written


def test_an_entry_that_another_process_makes_is_waited_for(corpus, monkeypatch):
    store, write, heard = Cache(corpus), Writer(), Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    store.folder.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with locked(store.folder / ".lock"):
            waiting = pool.submit(store.get, "train", KEY, write)
            assert heard.line.wait(60)
            assert write.calls == 0
        assert waiting.result(60).read_bytes() == b"content"
    who = f"process {os.getpid()} on {socket.gethostname()}"
    assert heard.getvalue() == f"waiting until {who} has made what is needed here\n"


def test_a_lock_of_another_user_is_no_hindrance(corpus, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("recurra.data._files.locked", refuse)
    assert Cache(corpus).get("train", KEY, Writer()).read_bytes() == b"content"


def test_a_full_disk_is_the_caches_affair(corpus, tmp_path):
    def fail(out):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"cache is .*named, which cannot be written \(.*No space .*train-.*\); expected"):
        Cache(corpus, tmp_path / "named").get("train", KEY, fail)


def test_a_file_of_the_data_is_not_the_caches_affair(corpus):
    def fail(out):
        raise PermissionError(errno.EACCES, "Permission denied", str(corpus / "a.mp4"))

    with pytest.raises(PermissionError, match=r"Permission denied: .*a\.mp4'$"):
        Cache(corpus).get("train", KEY, fail)


def test_a_sound_entry_in_a_read_only_folder_is_used(corpus):
    path = Cache(corpus).get("train", KEY, Writer())
    path.parent.chmod(0o555)
    write = Writer()
    assert Cache(corpus).get("train", KEY, write) == path
    assert write.calls == 0


def unknown(user):
    raise KeyError(user)


def test_an_account_without_a_home_is_told_what_to_do(corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(FileNotFoundError, match=r"user's cache folder is unknown .*XDG_CACHE_HOME"):
        Cache(corpus)
    assert Cache(corpus, tmp_path / "named").get("train", KEY, Writer()).is_file()
