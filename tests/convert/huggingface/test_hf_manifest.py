"""Folders for transformers: digests of their files, and what is refused before transformers reads it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.convert.huggingface.conftest import VOCABULARY, build
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from recurra._files.digests import MANIFEST, read_manifest, stamped
from recurra.convert.huggingface.folder import load_folder, save_folder
from recurra.convert.portable import PortableModel
from recurra.data.tokenizers import Vocabulary

WORDS = Vocabulary.from_text([" ".join(f"w{number}" for number in range(VOCABULARY - 2))])
WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of `recurra convert`: with an experiment and a tokenizer."""
    portable = PortableModel(build("gateloop").float().model, WORDS, {"seed": 3}, 7)
    save_folder(portable, str(tmp_path))
    return tmp_path


@pytest.fixture
def tuned(tmp_path) -> Path:
    """A folder of `save_pretrained`."""
    build("gateloop").save_pretrained(tmp_path)
    return tmp_path


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_changed_file_is_refused_by_name(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    message = rf"{name} is damaged: its content does not match its digest in manifest\.json; expected the file that was"
    with pytest.raises(ValueError, match=message):
        load_folder(str(folder))
    (folder / name).unlink()
    message = (
        rf"{name} is missing, although manifest\.json lists it; expected the folder as it was written: copy it again$"
    )
    with pytest.raises(ValueError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_what_save_pretrained_wrote_has_digests_too(tuned, name):
    assert set(read_manifest(tuned)["files"]) == {WEIGHTS, CONFIG, GENERATION}
    AutoModelForCausalLM.from_pretrained(tuned)
    (tuned / name).write_bytes((tuned / name).read_bytes() + b" ")
    with pytest.raises(ValueError, match=f"{name} is damaged: its content does not match its digest"):
        AutoModelForCausalLM.from_pretrained(tuned)


def test_a_config_is_compared_with_its_digest_before_it_is_read(tuned):
    rewrite(tuned / CONFIG, n_layer="two")
    with pytest.raises(ValueError, match=rf"{CONFIG} is damaged: its content does not match its digest"):
        AutoConfig.from_pretrained(tuned)


def test_what_was_there_stays_if_a_folder_cannot_be_written(folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def fail(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(modeling_utils, "safe_save_file", fail)
    with pytest.raises(
        OSError, match=r"is not written \(I/O error: No space left on device \(os error 28\)\); expected a"
    ):
        save_folder(PortableModel(build("gateloop").float().model, WORDS), folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_shards_have_digests_and_stale_ones_are_forgotten(tuned):
    model = AutoModelForCausalLM.from_pretrained(tuned)
    model.save_pretrained(tuned, max_shard_size="4KB")
    shards = {path.name for path in tuned.glob("*.safetensors*")}
    assert len(shards) > 2
    assert set(read_manifest(tuned)["files"]) == {CONFIG, GENERATION, *shards}
    AutoModelForCausalLM.from_pretrained(tuned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: rewrite(path, step=8), r"manifest\.json is damaged: its content does not have its digest"),
        (lambda path: path.write_text(json.dumps(stamped({"step": 3}))), r"manifest\.json is without files"),
        (lambda path: path.write_text("["), r"manifest\.json is not readable as JSON"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(folder, change, message):
    change(folder / MANIFEST)
    with pytest.raises(ValueError, match=message):
        load_folder(folder)


@pytest.mark.parametrize(
    ("load", "value"), [(load_folder, torch.nan), (AutoModelForCausalLM.from_pretrained, torch.inf)]
)
def test_weights_that_are_not_finite_are_refused_by_name(tuned, load, value):
    weights = load_file(tuned / WEIGHTS)
    weights["backbone.model.norm.weight"][3] = value
    save_file(weights, tuned / WEIGHTS, {"format": "pt"})
    (tuned / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* is a tensor with numbers that are not finite"):
        load(tuned)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_a_folder_names_is_refused_before_transformers_sees_it(folder, name, monkeypatch):
    (folder / MANIFEST).unlink()
    (folder / "own.py").write_text("raise SystemExit('the code was run')")
    rewrite(folder / name, auto_map={"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]})
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("transformers read it"))
    with pytest.raises(
        ValueError, match=rf"{name} is a file with auto_map, which names code to run; expected a folder"
    ):
        load_folder(folder)
