"""MDS, the format of MosaicML's streaming: shards of samples with named columns, beside an index.json for each split.

A shard has the number of its samples, the place of each and of the end, a description in JSON, and then the samples:
the sizes of the columns whose size varies, then the columns. All numbers are 32 bits, little-endian. Read are shards
without compression whose columns are texts, bytes or arrays of tokens; written are arrays of tokens, one for each
document. (The package itself wants an older numpy and the clients of four clouds.)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recurra.checks import sentence
from recurra.files.reading import read_json

MDS_INDEX = "index.json"
_MOST_INDEX_BYTES = 2**30
COLUMN = "tokens"
SIZE_LIMIT = 2**32 - 1
"""Bytes of a shard: places are numbers of 32 bits."""
_NUMBER = np.dtype("<u4")
_SIZES = ("u1", "<u2", "<u4", "<u8")  # of an array's dimensions: the narrowest that holds the largest
_NAMES = {"|u1": "uint8", "<u2": "uint16", "<u4": "uint32"}


@dataclass(frozen=True)
class MdsShard:
    """A file of samples. path: the file. names, encodings, sizes: of its columns; None for a size that varies."""

    path: Path
    n_samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    def places(self) -> np.ndarray:
        """Read where each sample begins, and where the last one ends: (n_samples + 1,).

        Raises OSError or ValueError if the file cannot be read or is damaged.
        """
        with self.path.open("rb") as file:
            (n,) = _numbers(file, 1, self.path)
            if n != self.n_samples:
                raise ValueError(
                    sentence(str(self.path), f"a shard of {n} samples", f"{self.n_samples}, as its index says")
                )
            places = _numbers(file, self.n_samples + 1, self.path).astype(np.int64)
        if (np.diff(places) < 0).any() or places[-1] != self.path.stat().st_size:
            raise ValueError(sentence(str(self.path), "damaged or cut short", "the shard of its index"))
        return places

    @property
    def dtype(self) -> np.dtype:
        """The type of the tokens in a shard written by `write_shard`."""
        return np.dtype(self.encodings[0].partition(":")[2]).newbyteorder("<")

    def values(self, column: str) -> Iterator[Any]:
        """Yield a column of each sample: str, bytes, or an array.

        Raises:
            OSError: the file cannot be read.
            ValueError: there is no such column, or the file is damaged.
        """
        if column not in self.names:
            expected = f"a column named {column!r}; there is {', '.join(self.names)}"
            raise ValueError(sentence(str(self.path), f"a shard without {column!r}", expected))
        which, places = self.names.index(column), self.places()
        with self.path.open("rb") as file:
            file.seek(int(places[0]))
            for size in np.diff(places).tolist():
                yield _decoded(self._part(file.read(size), which), self.encodings[which], self.path)

    def _part(self, sample: bytes, which: int) -> bytes:
        varying = sum(size is None for size in self.sizes)
        given = iter(np.frombuffer(sample, _NUMBER, varying).tolist())
        sizes = [next(given) if size is None else size for size in self.sizes]
        start = _NUMBER.itemsize * varying + sum(sizes[:which])
        return sample[start : start + sizes[which]]


def read_index(folder: Path) -> list[MdsShard]:
    """List the shards of a split.

    Raises:
        OSError: there is no index, or it cannot be read.
        ValueError: it is another format or version, or the shards are compressed.
    """
    path = folder / MDS_INDEX
    content = read_json(path, most_bytes=_MOST_INDEX_BYTES)
    if content.get("version") != 2 or not isinstance(content.get("shards"), list):
        raise ValueError(sentence(str(path), "another file", "an index of MDS shards, version 2"))
    return [_shard(folder, entry, path) for entry in content["shards"]]


def _shard(folder: Path, entry: Mapping[str, Any], index: Path) -> MdsShard:
    try:
        if entry["format"] != "mds" or entry["compression"] is not None:
            came = f"an index of {entry['format']} shards with compression {entry['compression']}"
            raise ValueError(sentence(str(index), came, "mds shards without compression"))
        name, columns = entry["raw_data"]["basename"], ("column_names", "column_encodings", "column_sizes")
        if Path(name).name != name:
            raise ValueError(sentence(str(index), f"an index with the shard {name!r}", "names of files beside it"))
        return MdsShard(folder / name, int(entry["samples"]), *(tuple(entry[key]) for key in columns))
    except (KeyError, TypeError) as error:
        raise ValueError(sentence(str(index), f"damaged ({error})", "an index of MDS shards")) from error


def _numbers(file: BinaryIO, n: int, path: Path) -> np.ndarray:
    data = file.read(_NUMBER.itemsize * n)
    if len(data) < _NUMBER.itemsize * n:
        raise ValueError(sentence(str(path), "cut short", "a whole shard"))
    return np.frombuffer(data, _NUMBER)


def _decoded(data: bytes, encoding: str, path: Path) -> Any:
    kind, _, how = encoding.partition(":")
    if kind == "str":
        return data.decode("utf-8")
    if kind == "bytes":
        return data
    if kind == "ndarray":
        dtype, _, shape = how.partition(":")
        if dtype in _NAMES.values() and not shape:
            return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=array_header(data[0]))
    raise ValueError(sentence(str(path), f"a shard with a column of {encoding}", "texts, bytes or arrays of tokens"))


def array_header(first: int) -> int:
    """Return how many bytes stand before an array's numbers: its dimensions and the width of their sizes, and these."""
    return 1 + (first >> 2) * np.dtype(_SIZES[first % 4]).itemsize


def encoding_of(dtype: np.dtype) -> str:
    """Name a column of arrays of unsigned numbers."""
    return f"ndarray:{_NAMES[dtype.str]}"


def write_shard(file: BinaryIO, tokens: np.ndarray, starts: np.ndarray) -> None:
    """Write tokens (n,), cut into documents at `starts`, as one sample for each.

    Raises:
        ValueError: they are more than a shard can hold.
    """
    ends = np.append(starts[1:], len(tokens))
    samples = [_sample(tokens[start:end]) for start, end in zip(starts.tolist(), ends.tolist())]
    config = json.dumps(_config(tokens.dtype), sort_keys=True).encode()
    begin = _NUMBER.itemsize * (len(samples) + 2) + len(config)
    places = np.cumsum([begin, *map(len, samples)])
    if places[-1] > SIZE_LIMIT:
        raise ValueError(sentence("the tokens of a shard", f"{places[-1]:,} bytes", f"at most {SIZE_LIMIT:,}"))
    file.write(np.array([len(samples)], _NUMBER).tobytes() + places.astype(_NUMBER).tobytes() + config)
    file.writelines(samples)


def _sample(document: np.ndarray) -> bytes:
    width = next(k for k, dtype in enumerate(_SIZES) if len(document) < 2 ** (8 * np.dtype(dtype).itemsize))
    data = bytes([1 << 2 | width]) + np.array(len(document), _SIZES[width]).tobytes() + document.tobytes()
    return np.array(len(data), _NUMBER).tobytes() + data


def _config(dtype: np.dtype) -> dict[str, Any]:
    columns = {"column_names": [COLUMN], "column_encodings": [encoding_of(dtype)], "column_sizes": [None]}
    return {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": SIZE_LIMIT, **columns}


def index_of(shards: Sequence[tuple[Path, int]], dtype: np.dtype) -> dict[str, Any]:
    """Return the content of a split's index.json. shards: their files, and how many documents each has."""
    entries = []
    for path, n in shards:
        raw = {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}
        entries.append({**_config(dtype), "raw_data": raw, "samples": n, "zip_data": None})
    return {"version": 2, "shards": entries}


def token_places(places: np.ndarray, starts: np.ndarray, n_tokens: int) -> np.ndarray:
    """Where the tokens of each document begin, in bytes, in a shard written by `write_shard`: (n_samples,)."""
    lengths = np.diff(np.append(starts, n_tokens))
    widths = np.select([lengths < 2**8, lengths < 2**16, lengths < 2**32], [1, 2, 4], 8)
    return places[:-1] + _NUMBER.itemsize + 1 + widths
