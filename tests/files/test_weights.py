"""Weights as files hold them: digests, finite numbers, shapes."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recurra._files.digests import content_digest
from recurra._files.weights import read_safetensors, require_finite, shape_difference, write_safetensors

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4),
    "d": torch.tensor(True),
    "e": torch.arange(3) * 1j,
}


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"].reshape(3, 2)},
        {"a": TENSORS["a"].view(torch.int32)},
        {"a": -TENSORS["a"]},
        {"b": TENSORS["a"], "a": TENSORS["b"]},
        {"c": torch.zeros(4, 0)},
        {"f": torch.zeros(1)},
    ],
)
def test_names_types_shapes_and_bytes_are_in_the_digest(change):
    assert content_digest({"x": 1}, TENSORS) != content_digest({"x": 1}, {**TENSORS, **change})


def test_the_digest_is_of_the_content_alone():
    expected = content_digest({"x": 1, "y": [2]}, TENSORS)
    assert expected == content_digest({"y": [2], "x": 1}, dict(reversed(list(TENSORS.items()))))
    assert expected == content_digest({"x": 1, "y": [2]}, {**TENSORS, "a": TENSORS["a"].T.contiguous().T})
    assert expected != content_digest({"x": 1, "y": [3]}, TENSORS)


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.nan, torch.float32), (-torch.inf, torch.bfloat16), (torch.inf, torch.complex64)]
)
def test_what_is_not_finite_is_refused_by_name(value, dtype):
    weights = {**TENSORS, "x": torch.zeros(4, 5, dtype=dtype), "y": torch.zeros(2)}
    require_finite(weights, "model.pt")
    weights["x"][3, 4] = value
    weights["y"][0] = value
    message = r"^x in model\.pt is a tensor with numbers that are not finite; expected finite numbers$"
    with pytest.raises(ValueError, match=message):
        require_finite(weights, "model.pt")


def test_numbers_of_one_byte_and_placeholders():
    weights = {"x": torch.zeros(4).to(torch.float8_e4m3fn), "y": torch.empty(3, device="meta")}
    require_finite(weights, "model.pt")
    weights["x"] = torch.full((4,), torch.nan).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"x in model\.pt"):
        require_finite(weights, "model.pt")


def test_shapes_that_differ_are_listed():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    assert shape_difference(model, model.state_dict()) == ""
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 1)).state_dict()
    expected = "0.bias (4,), here (5,), 0.weight (4, 3), here (5, 3), 1.weight (1, 4), here (1, 5) and 2 more"
    assert shape_difference(model, other) == expected


def test_our_files_are_those_of_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {**TENSORS, "f": torch.arange(6.0).reshape(2, 3).T, "g": torch.ones(5, dtype=torch.float8_e5m2)}
    with path.open("wb") as file:
        write_safetensors(file, tensors, {"x": "1"})
    for found, metadata in (read_safetensors(path), (load_file(path), {"x": "1"})):
        assert metadata == {"x": "1"}
        assert content_digest({}, found) == content_digest({}, tensors)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (57).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[999],"data_offsets":[0,4]}}  ' + bytes(4),
        (57).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}    ' + bytes(4),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*a\.safetensors is damaged or no safetensors file[^\n]*; expected a"):
        read_safetensors(path)
