"""The folder of a run: one process at a time trains in it, and notices when it goes away."""

import errno
import os
import shutil
import socket

import pytest

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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_everybody_gets_one(tmp_path, monkeypatch, number):
    """A file that stands for a lock would block the others once its process was killed."""

    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unsupported)
    locks = [RunFolder(tmp_path), RunFolder(tmp_path)]
    for lock in locks:
        lock.lock()
        lock.require_in_place()
    for lock in locks:
        lock.unlock()


def move(folder):
    folder.rename(folder.with_name("two"))


def replace(folder):
    shutil.rmtree(folder)
    RunFolder(folder).lock()


@pytest.mark.parametrize("change", [move, replace])
def test_a_folder_that_goes_away_is_noticed(lock, tmp_path, change):
    lock.require_in_place()
    change(tmp_path / "runs" / "one")
    with pytest.raises(FileNotFoundError, match=r"run is .*one, which was removed, moved or replaced while it was"):
        lock.require_in_place()


def test_locking_removes_what_killed_trainings_left_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    digits = "0123456789abcdef"
    left = [".summary.json", ".log.jsonl", "checkpoints/.step-0000000004.safetensors", "checkpoints/.best.safetensors"]
    others = [
        f".eval-test.json.{digits}.tmp",  # perhaps written just now by another command
        ".summary.json.tmp",
        f".summary.json.{digits[:-1]}.tmp",
        f"summary.json.{digits}.tmp",
        f"checkpoints/.best.safetensors.{digits}.tmp.safetensors",
    ]
    for name in [*(f"{name}.{digits}.tmp" for name in left), *others]:
        (tmp_path / name).write_text("half")
    folder.lock()
    folder.unlock()
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*others, ".lock"}
