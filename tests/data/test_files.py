import hashlib

import pytest

from recurra.data.files import file_sha256, replacing


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
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()


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


def test_others_may_read_the_file(tmp_path):
    plain, replaced = tmp_path / "plain", tmp_path / "replaced"
    plain.write_bytes(b"")
    with replacing(replaced):
        pass
    assert replaced.stat().st_mode == plain.stat().st_mode
