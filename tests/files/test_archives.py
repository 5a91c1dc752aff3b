"""Archives of torch.save: what is refused before it is unpacked, and what a digest finds that checksums do not."""

import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from benchmarks.faults.binary_mutants import (
    archive_members,
    compress_members,
    overlapping_members,
    pack,
    swap_members,
    zip_bomb,
)

from recurra.files.archives import ArchiveError, check_archive, is_archive, load_archive, seal_archive

CONTENT = {"a": torch.arange(64.0), "b": torch.arange(64.0) + 1, "step": 3, "list": [1, 2.5, "x"]}


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "a.pt"
    with path.open("xb") as file:
        torch.save(CONTENT, file)
        seal_archive(file, path)
    return path


def test_a_sealed_archive_is_read_and_torch_reads_it_too(saved):
    for loaded in (load_archive(saved), torch.load(saved, weights_only=True)):
        assert torch.equal(loaded["a"], CONTENT["a"])
        assert loaded["list"] == CONTENT["list"]
    assert is_archive(saved)


def test_an_archive_without_a_digest_is_read(tmp_path):
    torch.save(CONTENT, tmp_path / "a.pt")
    assert torch.equal(load_archive(tmp_path / "a.pt")["b"], CONTENT["b"])


def test_members_that_have_changed_places_are_refused(saved):
    saved.write_bytes(swap_members(saved.read_bytes()))
    assert torch.load(saved, weights_only=True)["a"][0] == 1  # every checksum is right
    with pytest.raises(ArchiveError, match="its members do not match its digest"):
        check_archive(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compress_members, r"its member archive/data\.pkl is compressed, to \d+ bytes when unpacked"),
        (lambda content: zip_bomb(10**7, content), "is compressed, to"),
        (lambda content: overlapping_members(content, 1000), "its members are larger than the file"),
        (
            lambda content: pack({**archive_members(content), "archive/../b": b""}),
            r"'archive/\.\./b' is no place inside one folder",
        ),
        (lambda content: pack({**archive_members(content), "/b": b""}), "'/b' is no place inside one folder"),
        (lambda content: pack({**archive_members(content), "b": b""}), "'b' is no place inside one folder"),
        (lambda content: pack({**archive_members(content), "b/c": b""}), "its members are in several folders"),
    ],
)
def test_what_torch_never_writes_is_refused(saved, change, message):
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(ArchiveError, match=message):
        load_archive(saved)


def test_two_members_of_one_name_are_refused(saved):
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("archive/data/0", bytes(4))
    with pytest.raises(ArchiveError, match="two of its members have one name"):
        load_archive(saved)


def test_a_bomb_is_refused_before_a_member_is_read(saved, monkeypatch):
    saved.write_bytes(zip_bomb(10**7))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *arguments: pytest.fail("a member was read"))
    with pytest.raises(ArchiveError, match="is compressed, to"):
        load_archive(saved)


def test_a_directory_that_is_too_long_is_not_read(saved):
    content = bytearray(pack(archive_members(saved.read_bytes())))
    content += bytes(9 * 2**20)
    # An end of the archive whose directory would be the whole file.
    content += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 9 * 2**20, 0, 0)
    saved.write_bytes(content)
    with pytest.raises(ArchiveError, match=r"its directory takes \d+ bytes, above"):
        load_archive(saved)


class Call:
    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_that_asks_for_memory_is_refused(saved):
    members = archive_members(saved.read_bytes())
    members["archive/data.pkl"] = pickle.dumps(Call(bytearray, 10**12), protocol=2)
    saved.write_bytes(pack(members))
    with pytest.raises(ArchiveError, match="it calls __builtin__ bytearray"):
        load_archive(saved)


def test_a_tensor_larger_than_its_file_is_refused(saved):
    torch.save({"a": torch.zeros(1).expand(10**12)}, saved)
    with pytest.raises(ArchiveError, match=r"a tensor of shape \(1000000000000,\) is larger than the file"):
        load_archive(saved)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps({"a": 1})])
def test_other_files_are_refused(saved, content):
    saved.write_bytes(content)
    assert not is_archive(saved)
    with pytest.raises(ArchiveError):
        load_archive(saved)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_archive(tmp_path / "nothing.pt")
