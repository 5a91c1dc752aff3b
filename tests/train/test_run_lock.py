"""One process at a time trains a run."""

import errno
import os
import shutil
import socket

import pytest
from filelock import FileLock

from recurra.train.run_folder import RunFolder


@pytest.fixture
def lock(tmp_path):
    lock = RunFolder(tmp_path / "runs" / "one")
    lock.lock()
    yield lock
    lock.unlock()


def test_a_second_lock_is_refused_and_names_the_holder(lock, tmp_path):
    lock.lock()  # again is nothing new
    other = RunFolder(tmp_path / "runs" / "one")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(BlockingIOError, match=rf"run is .*one, which {holder} trains; expected a run that nobody"):
        other.lock()
    lock.unlock()
    other.lock()
    with pytest.raises(BlockingIOError):
        lock.lock()
    other.unlock()
    other.unlock()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_lock_ends_with_its_process(tmp_path):
    child = os.fork()
    if child == 0:
        RunFolder(tmp_path).lock()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").read_text().startswith(f"process {child} on ")
    lock = RunFolder(tmp_path)
    lock.lock()
    lock.unlock()


def test_without_locks_everybody_gets_one(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(FileLock, "acquire", unsupported)
    locks = [RunFolder(tmp_path), RunFolder(tmp_path)]
    for lock in locks:
        lock.lock()
        lock.require_in_place()
    for lock in locks:
        lock.unlock()


def remove(folder):
    shutil.rmtree(folder)


def move(folder):
    folder.rename(folder.with_name("two"))


def replace(folder):
    shutil.rmtree(folder)
    RunFolder(folder).lock()


@pytest.mark.parametrize("change", [remove, move, replace])
def test_a_folder_that_goes_away_is_noticed(lock, tmp_path, change):
    lock.require_in_place()
    change(tmp_path / "runs" / "one")
    with pytest.raises(FileNotFoundError, match=r"run is .*one, which was removed, moved or replaced while it was"):
        lock.require_in_place()


def test_a_disk_that_does_not_answer_is_no_folder_that_went_away(lock, monkeypatch):
    def timed_out(path):
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", timed_out)
        lock.require_in_place()
