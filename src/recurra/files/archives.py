"""The zip archives that torch.save writes: looked at before anything is unpacked, and sealed with a digest.

PyTorch stores the members of its archives as they are, one beside the other. A member that is compressed, that lies
outside the file or that shares its bytes with another one was not written by PyTorch, so a small file cannot ask for
much memory. Each member has a checksum, which PyTorch ignores.
"""

import hashlib
import io
import os
import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MOST_DIRECTORY_BYTES = 8 * 2**20
"""Bytes of an archive's directory: 100,000 members with PyTorch's short names."""
_MOST_PICKLE_BYTES = 64 * 2**20
"""Bytes of the member that says how the tensors are nested. It has no weights."""
_PIECE_BYTES = 2**20
_N_OLD_PICKLES = 5  # a number, the version, the machine, the content, the names of the storages
_SEAL = b"recurra sha256 "
SEAL_BYTES = len(_SEAL) + 64
"""Bytes that `seal_archive` adds to a file."""
_ALLOCATING = frozenset({"builtins bytearray", "__builtin__ bytearray"})
"""What PyTorch lets a file call with any number, and no file of weights needs."""


class ArchiveError(ValueError):
    """An archive that PyTorch did not write, or that has changed since; the message says what is wrong, in short."""


def load_archive(path: Path, device: torch.device | str = "cpu") -> Any:
    """Check every byte of an archive that torch.save wrote, and read it without running code of the file.

    Raises:
        OSError: it cannot be read.
        ArchiveError: it is truncated, altered, not such an archive, or holds objects that need code of their own.
    """
    check_archive(path)
    return _load(path, device)


def load_torch_file(path: Path, device: torch.device | str = "cpu") -> Any:
    """Read as `load_archive`, also what PyTorch wrote before version 1.6: pickles, which have no checksums.

    Raises:
        OSError, ArchiveError: as `load_archive`.
    """
    if is_archive(path):
        return load_archive(path, device)
    try:
        with path.open("rb") as file:
            for _ in range(_N_OLD_PICKLES):
                _require_no_calls(file)
    except ArchiveError:
        raise
    except Exception as error:  # pickletools raises many kinds for what is no pickle
        _raise_again(error)
    return _load(path, device)


def _load(path: Path, device: torch.device | str) -> Any:
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever torch raises for content that it cannot read
        _raise_again(error)
    for leaf in tree_leaves(content):
        # A tensor with strides of 0 can have any shape, and whoever copies it would allocate that.
        if isinstance(leaf, Tensor) and leaf.numel() * leaf.element_size() > path.stat().st_size:
            raise ArchiveError(f"a tensor of shape {tuple(leaf.shape)} is larger than the file")
    return content


def check_archive(path: Path) -> None:
    """Refuse an archive that is not one of torch.save's, or has changed since it was written.

    Sizes, names and the number of members are checked before any of them is read; then the checksums, in pieces; and
    the seal (`seal_archive`), if there is one.

    Raises:
        OSError: it cannot be read.
        ArchiveError: it is refused.
    """
    try:
        with _Archive(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _require_stored(members, path.stat().st_size)
            _require_checksums(archive, members)
            _require_small_pickles(archive, members)
            if archive.comment and archive.comment != _seal(members):
                raise ArchiveError("its members do not match its digest")
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises many kinds for a broken archive
        _raise_again(error)


def seal_archive(file: BinaryIO, path: Path) -> None:
    """Add the digest of all members to an archive: of their names, sizes and checksums, as the archive's comment.

    Checksums alone find a changed member, but not two that have changed places with their checksums.

    Args:
        file: the archive, open for writing, as torch.save left it.
        path: where `file` is, to read it.

    Raises:
        OSError: it cannot be read or written.
    """
    file.flush()
    with zipfile.ZipFile(path) as archive:
        comment = _seal(archive.infolist())
    # An archive ends with the length of its comment, 2 bytes, and the comment.
    file.seek(-2, os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)


class _Archive(io.FileIO):
    """A file that hands out no more at a time than a directory may have: zipfile reads directories as a whole."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MOST_DIRECTORY_BYTES:
            raise ArchiveError(f"its directory takes {size} bytes, above {_MOST_DIRECTORY_BYTES}")
        return super().read(size) or b""


def _require_stored(members: Sequence[zipfile.ZipInfo], n_bytes: int) -> None:
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise ArchiveError("two of its members have one name")
    for name in names:
        parts = name.split("/")
        if len(parts) < 2 or "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise ArchiveError(f"its member {name!r} is no place inside one folder")
    if len({name.partition("/")[0] for name in names}) > 1:
        raise ArchiveError("its members are in several folders")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ArchiveError(f"its member {member.filename} is compressed, to {member.file_size} bytes when unpacked")
    if sum(member.file_size for member in members) > n_bytes:
        raise ArchiveError("its members are larger than the file")


def _require_checksums(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    for member in members:
        try:
            for _ in _pieces(archive, member):
                pass
        except zipfile.BadZipFile as error:
            raise ArchiveError(f"wrong checksum in {member.filename}") from error


def _require_small_pickles(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    for member in members:
        if member.filename.endswith(".pkl"):
            if member.file_size > _MOST_PICKLE_BYTES:
                raise ArchiveError(f"{member.filename} takes {member.file_size} bytes, above {_MOST_PICKLE_BYTES}")
            _require_no_calls(b"".join(_pieces(archive, member)))


def _require_no_calls(pickle: bytes | BinaryIO) -> None:
    """Read a pickle's operations, without doing them, and refuse one that asks for memory by number."""
    for _, argument, _ in pickletools.genops(pickle):
        if argument in _ALLOCATING:
            raise ArchiveError(f"it calls {argument}")


def _pieces(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(member) as content:
        while piece := content.read(_PIECE_BYTES):
            yield piece


def _seal(members: Sequence[zipfile.ZipInfo]) -> bytes:
    digest = hashlib.sha256()
    for member in sorted(members, key=lambda member: member.filename):
        digest.update(f"{member.filename} {member.file_size} {member.CRC}\n".encode())
    return _SEAL + digest.hexdigest().encode()


def _raise_again(error: Exception) -> NoReturn:
    """Raise what names a file as it is; anything else, such as a seek to before the file, comes from its content."""
    if isinstance(error, OSError) and error.filename is not None:
        raise error
    raise ArchiveError(str(error).partition("\n")[0] or type(error).__name__) from error


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
