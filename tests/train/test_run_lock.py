"""One process at a time trains a run."""

import errno
import os
import shutil
import socket

import pytest
from filelock import FileLock

from recurra.train.run_folder import _RunLock


@pytest.fixture
def lock(tmp_path):
    lock = _RunLock(tmp_path / "runs" / "one")
    lock.acquire()
    yield lock
    lock.release()


def test_a_second_lock_is_refused_and_names_the_holder(lock, tmp_path):
    lock.acquire()  # again is nothing new
    other = _RunLock(tmp_path / "runs" / "one")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(BlockingIOError, match=rf"run is .*one, which {holder} trains; expected a run that nobody"):
        other.acquire()
    lock.release()
    other.acquire()
    with pytest.raises(BlockingIOError):
        lock.acquire()
    other.release()
    other.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_lock_ends_with_its_process(tmp_path):
    child = os.fork()
    if child == 0:
        _RunLock(tmp_path).acquire()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").read_text().startswith(f"process {child} on ")
    lock = _RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_forgotten_lock_is_released(tmp_path):
    _RunLock(tmp_path).acquire()
    lock = _RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_without_locks_everybody_gets_one(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(FileLock, "acquire", unsupported)
    locks = [_RunLock(tmp_path), _RunLock(tmp_path)]
    for lock in locks:
        lock.acquire()
        lock.require_in_place()
        assert not lock.exclusive
    for lock in locks:
        lock.release()


def remove(folder):
    shutil.rmtree(folder)


def move(folder):
    folder.rename(folder.with_name("two"))


def replace(folder):
    shutil.rmtree(folder)
    _RunLock(folder).acquire()


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
