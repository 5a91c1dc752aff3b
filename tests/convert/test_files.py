"""Weights of other code bases that are not what they should be."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recurra.convert.portable import read_weights

WEIGHTS = {"a": torch.arange(64.0), "b": torch.arange(64.0) + 1}


@pytest.fixture(params=["a.pt", "a.pyth", "old.bin", "a.safetensors"])
def saved(request, tmp_path) -> Path:
    path = tmp_path / request.param
    if path.suffix == ".safetensors":
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=not path.name.startswith("old"))
    return path


def test_weights_are_read(saved):
    found = read_weights(saved)
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"^[^\n]*{saved.name} is [^\n]*; expected [^\n]*$"):
        read_weights(saved)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(saved, value):
    weights = {**WEIGHTS, "b": torch.tensor([0, value])}
    save_file(weights, saved) if saved.suffix == ".safetensors" else torch.save({"state_dict": weights}, saved)
    with pytest.raises(
        ValueError, match=rf"^b in .*{saved.name} is a tensor with numbers that are not finite; expected"
    ):
        read_weights(saved)


class Call:
    def __reduce__(self):
        return Path.write_text, (Path("trace"), "was here")


@pytest.mark.parametrize("new", [True, False])
def test_reading_runs_no_code(tmp_path, monkeypatch, new):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Call()}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"a\.pt is no file of weights \("):
        read_weights(tmp_path / "a.pt")
    assert not Path("trace").exists()


def test_a_tensor_larger_than_its_file_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1).expand(10**9)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt is no file of weights \(a tensor of shape .* is larger than the file"):
        read_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [{3: torch.ones(2)}, {"a": torch.eye(2).to_sparse()}, [1], {"a": 1}])
def test_what_are_no_weights_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt holds no weights by name"):
        read_weights(tmp_path / "a.pt")
