import errno
import os

import pytest

from recurra._files.writing import leftovers, replacing


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    with replacing(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with replacing(path) as file:
        file.write(b"two")
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_half_way():
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_is_written_to_disk_after_the_file(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with replacing(tmp_path / "file") as file:
        file.write(b"one")
    temporary, folder = synced
    assert temporary.endswith(".tmp")
    assert folder == str(tmp_path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path, monkeypatch, number):
    def refuse(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    with replacing(tmp_path / "file") as file:
        file.write(b"one")
    assert (tmp_path / "file").read_bytes() == b"one"


def test_an_error_of_writing_names_the_file(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space") as caught, replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    assert caught.value.errno == errno.ENOSPC
    path.mkdir()
    with pytest.raises(IsADirectoryError) as caught, replacing(path):
        pass
    assert caught.value.filename == str(path)
    assert caught.value.filename2 is None


@pytest.mark.parametrize("error", [OSError("no number"), FileNotFoundError(errno.ENOENT, "missing", "another")])
def test_errors_of_others_pass_as_they_are(tmp_path, error):
    with pytest.raises(OSError, match=r"no number|missing") as caught, replacing(tmp_path / "file"):
        raise error
    assert caught.value is error


def test_what_a_killed_process_left_is_found(tmp_path):
    (tmp_path / ".hidden.tmp").touch()
    with replacing(tmp_path / "a.b.tmp"):
        (found,) = leftovers(tmp_path)
        assert found[1] == "a.b.tmp"
        assert found[0].exists()
    assert list(leftovers(tmp_path)) == []
    assert list(leftovers(tmp_path / "nowhere")) == []
