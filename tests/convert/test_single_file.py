"""The single file: its digest, older files without one, and files that are not what they should be."""

import json
import logging
from pathlib import Path
from random import Random

import pytest
import torch
from benchmarks.faults.binary_mutants import (
    drop_metadata,
    drop_tensor,
    parse_safetensors,
    poison_safetensors,
    rename_tensor,
    swap_tensors,
    write_safetensors,
)

from recurra.convert import PortableModel, load_single_file, save_single_file
from recurra.data import Vocabulary
from recurra.models import LanguageModel, LanguageModelConfig

WORDS = Vocabulary.from_text(["a cat and a dog\n"])


@pytest.fixture
def saved(tmp_path) -> Path:
    config = LanguageModelConfig(vocab_size=len(WORDS), n_layer=2, d_model=8, d_channel_mixing=8, mixer="min-gru")
    path = tmp_path / "model.safetensors"
    save_single_file(PortableModel(LanguageModel(config).eval(), WORDS, {"seed": 3}, 7), path)
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_keeps_its_type(tmp_path, dtype):
    config = LanguageModelConfig(vocab_size=len(WORDS), n_layer=1, d_model=8, d_channel_mixing=8, tie_embeddings=True)
    model = LanguageModel(config).to(dtype).eval()
    save_single_file(PortableModel(model, WORDS, {}, 0), tmp_path / "one.safetensors")
    found = load_single_file(tmp_path / "one.safetensors").model
    for name, right in model.state_dict().items():
        assert found.state_dict()[name].dtype == right.dtype
        assert torch.equal(found.state_dict()[name], right)
    assert found.head.weight is found.embedding.weight


def describe(path: Path, *, to: str = "recurra model 2", **changes) -> None:
    """Change the description; without a digest in format 1, with the old one in format 2."""
    parts = parse_safetensors(path.read_bytes())
    description = {**json.loads(parts.metadata["recurra"]), "format": to, **changes}
    if to.endswith("1"):
        del description["digest"]
    metadata = {**parts.metadata, "recurra": json.dumps(description)}
    path.write_bytes(write_safetensors(parts._replace(metadata=metadata)))


def test_a_file_without_a_digest_is_read_with_a_note(saved, caplog):
    expected = load_single_file(saved)
    assert not caplog.records
    describe(saved, to="recurra model 1")
    with caplog.at_level(logging.WARNING):
        found = load_single_file(saved)
    assert [record.getMessage() for record in caplog.records] == [
        f"{saved} has no digest, so damage to it would not be recognised: it is older, or of others"
    ]
    assert found[2:] == expected[2:] == ({"seed": 3}, 7)
    weights = found.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        swap_tensors,
        drop_tensor,
        lambda content: rename_tensor(content, Random(1)),
        lambda content: poison_safetensors(content, Random(1)),
        lambda content: content.replace(b"dog", b"dig"),
        lambda content: content.replace(rb"\"step\": 7", rb"\"step\": 8"),
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
)
def test_another_content_does_not_match_the_digest(saved, change):
    whole = saved.read_bytes()
    saved.write_bytes(change(whole))
    assert saved.read_bytes() != whole
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its content does not match its digest"):
        load_single_file(saved)


def test_a_missing_digest_is_only_for_older_files(saved):
    describe(saved, digest=None)
    with pytest.raises(ValueError, match="its content does not match its digest"):
        load_single_file(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": 3}, r"config in .*model\.safetensors is an int; expected dict"),
        ({"step": "7"}, r"step in .*model\.safetensors is a str; expected int or null"),
        ({"more": 1}, r"the description in .* is one with config, .*more.*; expected format, model"),
        ({"model": "Other"}, r"model\.safetensors is of a Other; expected a model that this version knows"),
        ({"config": {"vocab_size": 0}}, r"model\.safetensors: .*vocab_size"),
        ({"config": {"vocab_size": 9, "nothing": 0}}, r"model\.safetensors: .*nothing"),
        ({"config": {"vocab_size": len(WORDS), "d_model": 9}}, "other weights than its configuration says"),
        ({"config": {"vocab_size": len(WORDS), "d_model": 10**7}}, "other weights than its configuration says"),
        ({"config": {"vocab_size": len(WORDS), "n_layer": 10**9}}, "n_layer in .* is 1000000000; expected at most"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(saved, change, message):
    describe(saved, to="recurra model 1", **change)
    with pytest.raises(ValueError, match=message):
        load_single_file(saved)


def test_weights_that_are_not_finite_are_refused_by_name(saved):
    describe(saved, to="recurra model 1")
    parts = parse_safetensors(saved.read_bytes())
    start, _ = parts.header["norm.weight"]["data_offsets"]
    infinite = torch.tensor(torch.inf).numpy().tobytes()
    data = parts.data[:start] + infinite + parts.data[start + 4 :]
    saved.write_bytes(write_safetensors(parts._replace(data=data)))
    with pytest.raises(ValueError, match=r"norm\.weight in .*model\.safetensors is a tensor with numbers that are not"):
        load_single_file(saved)


def test_without_metadata_there_is_no_model(saved):
    saved.write_bytes(drop_metadata(saved.read_bytes()))
    with pytest.raises(ValueError, match="does not say which model its weights belong to; expected a file that"):
        load_single_file(saved)


def test_a_model_is_on_the_cpu_whatever_the_default_device_is(saved):
    expected = load_single_file(saved).model.state_dict()
    with torch.device("meta"):
        found = load_single_file(saved).model
    assert all(torch.equal(found.state_dict()[name], weight) for name, weight in expected.items())
