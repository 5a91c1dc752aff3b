"""Files of weights, damaged in many ways: each is refused in one sentence that names it, or read as it was."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from benchmarks.faults.binary_mutants import (
    ARCHIVE_MUTATORS,
    DAMAGES,
    SAFETENSORS_MUTATORS,
    parse_safetensors,
    write_safetensors,
)
from benchmarks.faults.mutants import mutants as text_mutants
from tests.training.payloads import payload

from recurra.convert import PortableModel, load_single_file, read_weights, save_single_file, tokenizer_to_json
from recurra.data import Vocabulary
from recurra.generation import Stream
from recurra.models import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.training.checkpoint import load_checkpoint, save_checkpoint

Read = Callable[[], Any]
WORDS = Vocabulary.from_text(["a cat and a dog\n"])
PER_MUTATOR = 4
FOLDER_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "recurra.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def portable() -> PortableModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=len(WORDS), n_layer=2, d_model=8, d_channel_mixing=8, mixer="min-gru")
    return PortableModel(LanguageModel(config).eval(), WORDS, {"experiment": "text", "seed": 3}, 7)


def content_of(model: PortableModel) -> Any:
    return (
        model.model.state_dict(),
        asdict(model.model.config),
        None if model.tokenizer is None else tokenizer_to_json(model.tokenizer),
        model.experiment,
        model.step,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def mutants(content: bytes, mutators, n: int = PER_MUTATOR) -> Iterator[tuple[str, bytes]]:
    for name, mutate in mutators.items():
        for number in range(n):
            mutant = mutate(content, Random(f"{name} {number}"))
            if mutant != content:
                yield f"{name} {number}", mutant


def refusal(read: Read, path: Path, name: str) -> tuple[bool, Any]:
    """Read a mutant. Anything but one sentence that names the file or its folder is a failure of the test."""
    try:
        return False, read()
    except (ValueError, OSError) as error:
        said = str(error)
        assert "\n" not in said, f"{name}: {said}"
        assert str(path.parent) in said, f"{name}: {said}"
        return True, None


def require_refused_or_equal(path: Path, read: Read, mutators) -> None:
    whole, expected = path.read_bytes(), read()
    n_refused = 0
    for name, mutant in mutants(whole, mutators):
        path.write_bytes(mutant)
        refused, found = refusal(read, path, name)
        assert refused or same(found, expected), f"{name} was read as something else"
        n_refused += refused
    assert n_refused > PER_MUTATOR  # the mutators do their work
    path.write_bytes(whole)
    assert same(read(), expected)


def test_a_single_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_single_file(portable(), path)
    require_refused_or_equal(path, lambda: content_of(load_single_file(path)), SAFETENSORS_MUTATORS)


def test_a_checkpoint(tmp_path):
    path = tmp_path / "best.pt"
    model = {"one": torch.arange(64.0), "other": torch.arange(64.0) + 1, "last": torch.ones(3, dtype=torch.complex64)}
    save_checkpoint(path, payload(model=model, average={"weights": model, "n_averaged": 3}))
    require_refused_or_equal(path, lambda: load_checkpoint(path), ARCHIVE_MUTATORS)


def test_a_stream(tmp_path):
    path, model = tmp_path / "stream", portable().model
    stream = Stream(model)
    stream.feed([1, 2, 3])
    stream.save(path)

    def read() -> Any:
        found = Stream(model)
        found.load(path)
        return list(tensors(found.state)), found.logits, found.recent, found.position

    require_refused_or_equal(path, read, SAFETENSORS_MUTATORS)


@pytest.mark.parametrize("name", FOLDER_FILES)
def test_a_folder_for_transformers(tmp_path, name):
    hf = pytest.importorskip("recurra.huggingface")
    hf.save_folder(portable(), tmp_path)
    mutators = SAFETENSORS_MUTATORS if name.endswith("safetensors") else DAMAGES
    require_refused_or_equal(tmp_path / name, lambda: content_of(hf.load_folder(tmp_path)), mutators)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("name", [name for name in FOLDER_FILES if name.endswith("json")])
def test_json_in_a_folder_for_transformers(tmp_path, name, digests):
    hf = pytest.importorskip("recurra.huggingface")
    hf.save_folder(portable(), tmp_path)
    expected = content_of(hf.load_folder(tmp_path))
    if not digests:
        (tmp_path / "recurra.json").unlink()
    if not (tmp_path / name).exists():
        return
    for number, mutant in enumerate(text_mutants((tmp_path / name).read_bytes(), "json", 40 if digests else 20)):
        (tmp_path / name).write_bytes(mutant.data)
        what = f"{mutant.name} {number}"
        refused, found = refusal(lambda: hf.load_folder(tmp_path), tmp_path / name, what)
        assert refused or not digests or same(content_of(found), expected), f"{what} was read as something else"


# --- without digests other numbers can be read, but nothing else goes wrong ---


@pytest.mark.parametrize("name", [name for name in FOLDER_FILES if name != "recurra.json"])
def test_a_folder_without_digests(tmp_path, name):
    hf = pytest.importorskip("recurra.huggingface")
    hf.save_folder(portable(), tmp_path)
    (tmp_path / "recurra.json").unlink()
    whole = (tmp_path / name).read_bytes()
    mutators = SAFETENSORS_MUTATORS if name.endswith("safetensors") else DAMAGES
    for what, mutant in mutants(whole, mutators, n=2):
        (tmp_path / name).write_bytes(mutant)
        refused, found = refusal(lambda: hf.load_folder(tmp_path), tmp_path / name, what)
        assert refused or all(tensor.isfinite().all() for tensor in found.model.state_dict().values())


def test_a_single_file_without_a_digest(tmp_path):
    path = tmp_path / "model.safetensors"
    save_single_file(portable(), path)
    parts = parse_safetensors(path.read_bytes())
    older = parts.metadata["recurra"].replace("recurra model 2", "recurra model 1")
    older = older[: older.index(', "digest"')] + "}"
    whole = write_safetensors(parts._replace(metadata={**parts.metadata, "recurra": older}))
    path.write_bytes(whole)
    assert load_single_file(path).step == 7
    for what, mutant in mutants(whole, SAFETENSORS_MUTATORS):
        path.write_bytes(mutant)
        refused, found = refusal(lambda: load_single_file(path), path, what)
        assert refused or all(tensor.isfinite().all() for tensor in found.model.state_dict().values())


@pytest.mark.parametrize("new", [True, False])
def test_weights_of_others(tmp_path, new):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(64.0), "b": torch.ones(64)}, path, _use_new_zipfile_serialization=new)
    whole = path.read_bytes()
    for what, mutant in mutants(whole, ARCHIVE_MUTATORS if new else DAMAGES):
        path.write_bytes(mutant)
        refused, found = refusal(lambda: read_weights(path), path, what)
        assert refused or all(tensor.isfinite().all() for tensor in found.values())
