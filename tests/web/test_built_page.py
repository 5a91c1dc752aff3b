"""The page in the package is the one that the sources in web/ make."""

import gzip
import json
from hashlib import sha256
from pathlib import Path

import pytest

import recurra.convert.export._page_files
from recurra.convert.export._page_files import MODULE, PAGE, RUNTIME, WEBGPU, page_file

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "web"
BUILT = Path(recurra.convert.export._page_files.__file__).parent / "page"
RECORD = json.loads((BUILT / "build.json").read_text())


def sources() -> str:
    """One digest of all sources, as build.mjs makes it."""
    files = (path for path in SOURCES.rglob("*") if path.is_file() and "node_modules" not in path.parts)
    names = sorted(path.relative_to(SOURCES).as_posix() for path in files)
    lines = [f"{name} {sha256((SOURCES / name).read_bytes()).hexdigest()}\n" for name in names]
    return sha256("".join(lines).encode()).hexdigest()


def test_the_page_was_built_from_these_sources():
    assert RECORD["sources"] == sources(), "web/ was changed since the page was built: run `make web`"


def test_the_built_files_are_those_of_the_build():
    found = {path.name: path.read_bytes() for path in BUILT.iterdir() if path.name != "build.json"}
    digests = {
        name: sha256(gzip.decompress(content) if name.endswith(".gz") else content).hexdigest()
        for name, content in found.items()
    }
    assert digests == RECORD["files"]


def test_onnxruntime_is_the_pinned_version():
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    pinned = json.loads((SOURCES / "package.json").read_text())["dependencies"]["onnxruntime-web"]
    entry = lock["node_modules/onnxruntime-web"]
    assert RECORD["onnxruntime"] == entry["version"] == pinned
    assert entry["integrity"].startswith("sha512-")
    assert all("resolved" not in package for package in lock.values()), "the lock names a host; see web/.npmrc"


def test_every_file_can_be_read():
    names = PAGE + RUNTIME + MODULE + WEBGPU
    assert {name: len(page_file(name)) > 100 for name in names} == dict.fromkeys(names, True)
    for name in ("ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.asyncify.wasm"):
        assert page_file(name).startswith(b"\0asm")
    with pytest.raises(FileNotFoundError, match=r"the file is \.\./__init__\.py; expected one of index\.html"):
        page_file("../__init__.py")
