"""MDS shards: those of others are read, and ours are read as others would."""

import itertools
import json
import struct

import numpy as np
import pytest

from recurra.data import TextConfig
from recurra.data.documents import find_units
from recurra.data.mds import read_index, write_shard
from recurra.data.prepare import Preparation, prepare
from recurra.data.shards import ShardCorpus

TEXTS = ["w1 w2 née", "", "w3\nw1 w2 w2\n", "w2"]


def write_mds(folder, parts, *, columns=("id", "text"), encodings=("int", "str"), sizes=(8, None), compression=None):
    """Write shards as the format's description says, by nothing of ours: a number and a text each."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, part in enumerate(parts):
        samples = [struct.pack("<Iq", len(t.encode()), k) + t.encode() for k, t in enumerate(part)]
        config = b'{"format": "mds"}'
        begin = 4 * (2 + len(samples)) + len(config)
        places = [begin + sum(map(len, samples[:k])) for k in range(len(samples) + 1)]
        data = struct.pack(f"<{2 + len(samples)}I", len(samples), *places) + config + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_encodings": encodings,
                "column_names": columns,
                "column_sizes": sizes,
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
                "size_limit": 67108864,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


@pytest.fixture
def others(tmp_path):
    write_mds(tmp_path / "others" / "train", [TEXTS[:3], TEXTS[3:], []])
    write_mds(tmp_path / "others" / "val", [TEXTS[:1]])
    return tmp_path / "others"


def test_texts_of_others_are_prepared_on_first_use(others, tmp_path):
    data = TextConfig(str(others), source="mds", cache=str(tmp_path / "cache"), segment_length=4).build()
    tokens = data.tokens("train")
    assert data.decode(tokens[:]) == "w1 w2 née\n\nw3\nw1 w2 w2\nw2\n"
    assert len(tokens.shards) == 3
    assert len(tokens.document_starts(0, len(tokens))) == 4
    assert data.decode(data.tokens("valid")[:]) == "w1 w2 née\n"


@pytest.mark.parametrize(
    ("field", "message"),
    [("body", "is a shard without 'body'; expected a column named 'body'; there is id, text"), ("id", "of int")],
)
def test_columns_that_are_no_texts(others, field, message):
    with pytest.raises(ValueError, match=message):
        [*find_units("mds", str(others), field=field)[0].documents()]


def documents_of(path, dtype):
    """Read the arrays of a shard as the format's description says, by nothing of ours."""
    data = path.read_bytes()
    (n,) = struct.unpack_from("<I", data)
    places = struct.unpack_from(f"<{n + 1}I", data, 4)
    for first, last in itertools.pairwise(places):
        (size,) = struct.unpack_from("<I", data, first)
        assert size == last - first - 4
        assert data[first + 4] >> 2 == 1  # dimensions
        width = 2 ** (data[first + 4] & 3)
        length = int.from_bytes(data[first + 5 : first + 5 + width], "little")
        yield np.frombuffer(data[first + 5 + width : last], dtype).tolist()
        assert length == (last - first - 5 - width) // np.dtype(dtype).itemsize


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("recurra.data.documents.PIECE_BYTES", 3000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "valid"):
        lines = (" ".join(f"w{(i * j) % 290}" for j in range(i % 7 if i % 9 else 300)) for i in range(40))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(("vocabulary", "dtype"), [("words", "<u2"), ("bytes", "u1")])
def test_shards_are_those_of_the_format_and_of_numpy(corpus, tmp_path, vocabulary, dtype):
    for form in ("npy", "mds"):
        prepare(Preparation("folder", str(corpus), tmp_path / form, vocabulary=vocabulary, format=form))
    of_numpy, of_mds = (ShardCorpus(tmp_path / form).tokens("train") for form in ("npy", "mds"))
    whole = of_numpy[:]
    assert len(of_mds.shards) == len(of_numpy.shards) > 1
    assert of_mds[:].dtype == whole.dtype
    for first, last in ((0, len(whole)), (3, 4), (299, 1203), (17, 17), (len(whole) - 5, len(whole) + 9), (0, 1)):
        assert np.array_equal(of_mds[first:last], whole[first:last])
    assert np.array_equal(of_mds.document_starts(0, 900), of_numpy.document_starts(0, 900))
    index = json.loads((tmp_path / "mds" / "train" / "index.json").read_text())
    documents = []
    for entry in index["shards"]:
        path = tmp_path / "mds" / "train" / entry["raw_data"]["basename"]
        part = list(documents_of(path, dtype))
        assert len(part) == entry["samples"]
        assert path.stat().st_size == entry["raw_data"]["bytes"]
        assert entry["column_encodings"] == [{"<u2": "ndarray:uint16", "u1": "ndarray:uint8"}[dtype]]
        documents += part
    starts = of_numpy.document_starts(0, len(whole))
    assert documents == [part.tolist() for part in np.split(whole, starts[1:])]
    assert [array.tolist() for array in read_index(tmp_path / "mds" / "train")[0].values("tokens")] == documents[
        : index["shards"][0]["samples"]
    ]


def test_training_reads_mds_as_it_reads_numpy(corpus, tmp_path):
    batches = []
    for form in ("npy", "mds"):
        prepare(Preparation("folder", str(corpus), tmp_path / form, format=form))
        config = TextConfig(str(tmp_path / form), source="shards", batch_size=3, segment_length=11, sampling="packed")
        batches.append(config.build().source("train").batch(1, 2))
    assert np.array_equal(batches[0].inputs, batches[1].inputs)
    assert np.array_equal(batches[0].cu_seqlens, batches[1].cu_seqlens)


def test_a_finished_shard_is_kept_and_a_damaged_one_is_found(corpus, tmp_path):
    what = Preparation("folder", str(corpus), tmp_path / "mds", format="mds")
    first = prepare(what)
    dates = {path: path.stat().st_mtime_ns for path in (tmp_path / "mds").rglob("*.mds")}
    (tmp_path / "mds" / "train" / ".shard.00000.mds.0123456789abcdef.tmp").write_bytes(b"half")
    (tmp_path / "mds" / "index.json").unlink()
    assert prepare(what) == first
    assert dates == {path: path.stat().st_mtime_ns for path in (tmp_path / "mds").rglob("*.mds")}
    assert not list((tmp_path / "mds" / "train").glob(".*"))
    path = tmp_path / "mds" / "train" / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard.00000.mds is damaged"):
        ShardCorpus(tmp_path / "mds").tokens("train")[:]


def test_what_cannot_be_read_is_refused(others, tmp_path):
    folder = others / "train"
    file = folder / "shard.00000.mds"
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:9], b"", b"\x04" + whole[1:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"shard.00000.mds is (damaged or )?(cut short|a shard of 4 samples)"):
            [*read_index(folder)[0].values("text")]
    write_mds(folder, [TEXTS], compression="zstd")
    with pytest.raises(ValueError, match="compression zstd; expected mds shards without compression"):
        read_index(folder)
    index = json.loads((others / "val" / "index.json").read_text())
    for key, message in (("raw_data", "damaged"), ("samples", "damaged")):
        shards = [{name: value for name, value in index["shards"][0].items() if name != key}]
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
        with pytest.raises(ValueError, match=message):
            read_index(folder)
    index["shards"][0]["raw_data"]["basename"] = "../val/shard.00000.mds"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected names of files beside it"):
        read_index(folder)


def test_a_shard_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("recurra.data.mds.SIZE_LIMIT", 300)
    with (tmp_path / "shard").open("wb") as file, pytest.raises(ValueError, match="expected at most 300"):
        write_shard(file, np.zeros(100, "<u2"), np.zeros(1, np.int64))
