"""The single file: its digest, and files that are not what they should be."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from benchmarks.faults.binary_mutants import (
    drop_metadata,
    drop_tensor,
    parse_safetensors,
    rename_tensor,
    swap_tensors,
    write_safetensors,
)

from recurra._files.digests import content_digest
from recurra._files.weights import read_safetensors
from recurra.convert.portable import PortableModel, load_single_file, save_single_file
from recurra.data.tokenizers import Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig

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
    path = str(tmp_path / "one.safetensors")
    save_single_file(PortableModel(model, WORDS, {}, 0), path)
    found = load_single_file(path).model
    for name, right in model.state_dict().items():
        assert found.state_dict()[name].dtype == right.dtype
        assert torch.equal(found.state_dict()[name], right)
    assert found.head.weight is found.embedding.weight


def sign(path: Path, **changes) -> None:
    """Change the description, and give the file the digest of what it has now."""
    parts, (weights, _) = parse_safetensors(path.read_bytes()), read_safetensors(path)
    description = {**json.loads(parts.metadata["recurra"]), **changes}
    del description["digest"]
    description["digest"] = content_digest({**description, "tokenizer": parts.metadata["tokenizer"]}, weights)
    metadata = {**parts.metadata, "recurra": json.dumps(description)}
    path.write_bytes(write_safetensors(parts._replace(metadata=metadata)))


@pytest.mark.parametrize(
    "change",
    [
        swap_tensors,
        drop_tensor,
        lambda content: rename_tensor(content, Random(1)),
        lambda content: content.replace(b"dog", b"dig"),
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
)
def test_another_content_does_not_match_the_digest(saved, change):
    whole = saved.read_bytes()
    saved.write_bytes(change(whole))
    assert saved.read_bytes() != whole
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its content does not match its digest"):
        load_single_file(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "Other"}, r"model\.safetensors is of a Other; expected a model that this version knows"),
        ({"config": {"vocab_size": 0}}, r"model\.safetensors: .*vocab_size"),
        ({"config": {"vocab_size": 9, "nothing": 0}}, r"model\.safetensors: .*nothing"),
        ({"config": {"vocab_size": len(WORDS), "d_model": 10**7}}, "other weights than its configuration says"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(saved, change, message):
    sign(saved, **change)
    with pytest.raises(ValueError, match=message):
        load_single_file(saved)


def test_weights_that_are_not_finite_are_refused_by_name(saved):
    parts = parse_safetensors(saved.read_bytes())
    start, _ = parts.header["norm.weight"]["data_offsets"]
    infinite = torch.tensor(torch.inf).numpy().tobytes()
    data = parts.data[:start] + infinite + parts.data[start + 4 :]
    saved.write_bytes(write_safetensors(parts._replace(data=data)))
    sign(saved)
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
