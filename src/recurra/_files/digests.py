"""SHA-256 digests: of files, JSON objects and tensors, and the manifest of a folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recurra._files.reading import read_json
from recurra._files.writing import write_json
from recurra.checks import sentence

BLOCK_BYTES = 4 * 2**20
"""How many bytes of a file are read at a time."""

STAMP = "sha256"
"""The key under which a JSON object carries the digest of all its other keys."""

MANIFEST = "manifest.json"
"""The file of a folder that lists its other files with their digests."""


def file_sha256(path: Path) -> str:
    """Compute the digest of a file's content. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Compute the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_sha256(content: Any) -> str:
    """Compute the digest of what JSON can hold; the order of keys and the layout of the file do not count."""
    # Through JSON and back, so that keys are sorted as the strings that they become.
    plain = json.loads(json.dumps(content))
    return text_sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")))


def content_digest(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Compute the digest of plain data and of tensors: of their names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def stamped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the digest of `content` to it, as its last key, `sha256`."""
    inside = {key: value for key, value in content.items() if key != STAMP}
    return {**inside, STAMP: json_sha256(inside)}


def checked_stamp(content: Mapping[str, Any], name: str, hint: str = "") -> dict[str, Any]:
    """Compare content, `name` in messages, with the digest that it carries, and return it without the digest."""
    inside = {key: value for key, value in content.items() if key != STAMP}
    if content.get(STAMP) != json_sha256(inside):
        raise ValueError(sentence(name, "damaged: its content does not have its digest", "what was written", hint))
    return inside


def write_stamped(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest as the last key, whole or not at all. Raises OSError."""
    write_json(path, stamped(content))


def read_stamped(path: Path, *, version: object = None, hint: str = "") -> dict[str, Any]:
    """Read a JSON object as `read_json`, compare it with its digest, and return it without.

    version: what the key `format` has to be; None asks for no such key.
    """
    content = read_json(path, hint=hint)
    if version is not None and content.get("format") != version:
        raise ValueError(sentence(f"the format of {path}", repr(content.get("format")), repr(version), hint))
    return checked_stamp(content, str(path), hint)


def write_manifest(folder: Path, about: Mapping[str, Any], patterns: Iterable[str]) -> None:
    """Write the manifest of a folder: `about`, and the digests of the files in it that fit `patterns`. Raises OSError.

    Files that an earlier manifest lists and that do not fit keep the digests that they have there.
    """
    earlier = read_manifest(folder).get("files", {})
    kept = {name: sha256 for name, sha256 in earlier.items() if not _fits(name, patterns) and (folder / name).is_file()}
    names = [path.name for path in folder.iterdir() if path.is_file() and _fits(path.name, patterns)]
    files = {**kept, **{name: file_sha256(folder / name) for name in names}}
    write_stamped(folder / MANIFEST, {**about, "files": dict(sorted(files.items()))})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder; empty if there is none, as in folders of others. Raises OSError, ValueError."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    again = f"write the folder again, or delete {MANIFEST} if you changed a file yourself"
    content = read_stamped(path, hint=again)
    if not isinstance(content.get("files"), dict):
        raise ValueError(sentence(str(path), "without files", "a manifest", again))
    return content


def require_files(folder: Path, files: Mapping[str, str], patterns: Iterable[str] = ("*",)) -> None:
    """Refuse a folder if a file that fits `patterns` does not have its digest, which `files` lists by name."""
    for name in sorted(name for name in files if _fits(name, patterns)):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            got = f"missing, although {MANIFEST} lists it"
            raise ValueError(sentence(str(path), got, "the folder as it was written", "copy it again"))
        if file_sha256(path) != files[name]:
            got = f"damaged: its content does not match its digest in {MANIFEST}"
            again = f"copy it again, or delete {MANIFEST} if you changed the file yourself"
            raise ValueError(sentence(str(path), got, "the file that was written", again))


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
