"""How tensors are taken out of a payload, tied ones once, and that the index of their files runs no code."""

import pickle

import pytest
import torch

from recurra.files.archives import seal_archive
from recurra.files.digests import file_sha256
from recurra.files.writing import replacing
from recurra.training import CheckpointError, load_checkpoint
from recurra.training.checkpoint import REST, with_stamp
from recurra.training.sharded_checkpoint import join_tensors, split_tensors


def test_tied_tensors_are_one_even_where_a_rank_has_no_rows_of_them():
    """FSDP gives a rank without rows of a parameter an empty view of memory that is padded."""
    memory, other = torch.zeros(4, 3), torch.zeros(4, 3)
    payload = {"model": {"first": memory[:0], "second": memory[:0], "third": other[:0]}, "list": [memory[1:], 5]}
    plain, tensors = split_tensors(payload)
    assert list(tensors) == ["model/first", "model/third", "list/0"]
    back = join_tensors(plain, tensors)
    assert back["model"]["second"] is back["model"]["first"] is tensors["model/first"]
    assert back["list"][1] == 5


def test_tensors_without_memory_are_apart():
    _, tensors = split_tensors({"model": {"first": torch.empty(0), "second": torch.empty(0)}})
    assert list(tensors) == ["model/first", "model/second"]


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.distributed.checkpoint.metadata", "os.system"), ("pathlib", "os.system"), ("os", "system")],
)
def test_an_index_runs_no_code(tmp_path, module, name):
    """A name with dots reaches into what a module imports."""
    folder, trace = tmp_path / "step-0000000001", tmp_path / "trace"
    folder.mkdir()
    words = [word.encode() for word in (module, name, f"echo was here > {trace}")]
    module_, name_, command = (pickle.SHORT_BINUNICODE + bytes([len(word)]) + word for word in words)
    calls = pickle.STACK_GLOBAL, command, pickle.TUPLE1, pickle.REDUCE, pickle.STOP
    (folder / ".metadata").write_bytes(b"".join([pickle.PROTO + b"\x04", module_, name_, *calls]))
    with replacing(folder / REST) as file:
        torch.save(with_stamp({"files": {".metadata": file_sha256(folder / ".metadata")}}), file)
        seal_archive(file, file.name)
    with pytest.raises(CheckpointError, match=rf"\.metadata is damaged \(it names {module}\.{name}\)"):
        load_checkpoint(folder)
    assert not trace.exists()
