"""A trained language model in each format, converted into every other."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from recurra import open_run
from recurra.cli import main
from recurra.convert.portable import PortableModel, save_single_file
from recurra.data.text import TextConfig
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train.checkpoint import CheckpointError
from recurra.train.formats import _format_of, _read_model, convert_model
from recurra.train.run import resume_run, score_run

TEXT = "a cat and a dog\nthe dog saw a cat\nthe naïve cat ran — away 日本\n"
WORDS = Vocabulary.from_text([TEXT])
BPE = BytePairEncoding.train([TEXT], 264)
SIZES = {"n_layer": 2, "d_model": 8, "d_channel_mixing": 8}
HEADS = {**SIZES, "n_heads": 2, "segment_length": 4}
MODELS = {
    "words": (
        WORDS,
        LanguageModel,
        LanguageModelConfig,
        {**SIZES, "mixer": ["s5", "gateloop"], "tie_embeddings": True},
    ),
    "crt": (
        BPE,
        CompactRecurrentTransformer,
        CompactRecurrentTransformerConfig,
        {**HEADS, "memory": "ncgru", "position": "rnn-ncgru"},
    ),
}


def portable(name) -> PortableModel:
    tokenizer, kind, config, options = MODELS[name]
    return PortableModel(kind(config(vocab_size=len(tokenizer), **options)).eval(), tokenizer)


@pytest.fixture(params=["words", "crt"])
def single(request, tmp_path) -> Path:
    """A model in a single file, whose experiment is not known."""
    save_single_file(portable(request.param), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def convert(source: Path, target: Path, to: str = "safetensors", **options) -> float:
    return convert_model(source, target, to, **options)


def weights(path) -> dict:
    return _read_model(path).model.state_dict()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was trained, with averaged weights."""
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(TEXT * 4, encoding="utf-8")
    recipe = {
        "experiment": "text-crt",
        "data": {"path": str(folder), "batch_size": 2, "segment_length": 4},
        "model": {"n_layer": 1, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8},
        "training": {"epochs": 2, "tensorboard": False, "accelerator": "cpu", "threads": torch.get_num_threads()},
        "optimizer": {"learning_rate": 0.003},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


def test_every_format_into_every_other(single, tmp_path):
    pytest.importorskip("transformers")
    places = {"safetensors": single}
    expected, tokenizer = weights(single), _read_model(single).tokenizer
    for number, (one, other) in enumerate(itertools.permutations(("safetensors", "run", "hf"), 2)):
        target = tmp_path / (f"{number}.safetensors" if other == "safetensors" else f"{number}")
        assert convert(places[one], target, other) == 0
        assert _format_of(target) == other
        places.setdefault(other, target)
        found = _read_model(target)
        values = found.model.state_dict()
        assert values.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in values.items())
        assert type(found.tokenizer) is type(tokenizer)
        assert found.tokenizer.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


def test_a_run_that_went_round_has_its_experiment_and_says_what_it_lacks(run, tmp_path):
    assert convert(run, tmp_path / "model.safetensors") == 0
    assert convert(tmp_path / "model.safetensors", tmp_path / "run", "run") == 0
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert yaml.safe_load(text) == yaml.safe_load((run / "config.yaml").read_text())
    assert "generated from, not resumed" in text
    assert "is not known" not in text
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    for which in ("best", "last"):
        assert open_run(tmp_path / "run", checkpoint=which).step == open_run(run).step
    one, other = (score_run(open_run(folder)) for folder in (run, tmp_path / "run"))
    assert one["loss"] == other["loss"]


def test_a_run_of_a_model_from_elsewhere_says_so(single, tmp_path):
    assert convert(single, tmp_path / "run", "run") == 0
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "How the model was trained is not known" in text
    data = yaml.safe_load(text)["data"]
    assert data["path"] == "unknown"
    tokenizer = _read_model(single).tokenizer
    assert TextConfig(**data).load_tokenizer(data["tokenizer"]).fingerprint == tokenizer.fingerprint
    trained = open_run(tmp_path / "run")
    assert getattr(trained.model.config, "segment_length", 256) == data["segment_length"]
    # a corpus that is given is read with the model's vocabulary
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "test.txt").write_text("the cat saw away\n" * 3)
    moved = open_run(tmp_path / "run", overrides=["--data.path", str(corpus)])
    assert score_run(moved)["n_targets"] == len(tokenizer.encode("the cat saw away\n" * 3)) - 1


def test_only_other_formats_and_free_places(run, tmp_path):
    target = tmp_path / "model.safetensors"
    assert convert(run, target) == 0
    with pytest.raises(FileExistsError, match="which exists; expected another name"):
        convert(run, target)
    assert convert(run, target, force=True) == 0
    with pytest.raises(FileExistsError, match="which contains a run; expected another name"):
        convert(target, run, "run", force=True)
    with pytest.raises(ValueError, match="which has the format run already"):
        convert(run, tmp_path / "other", "run")
    assert convert(run, tmp_path / "short", "run", dtype=torch.bfloat16) < 0.1
    assert next(open_run(tmp_path / "short").model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="are for runs"):
        convert(target, tmp_path / "other", "run", checkpoint="last")
    with pytest.raises(FileExistsError, match="which is a folder; expected the name of a file"):
        convert(run, tmp_path, force=True)


def test_a_folder_that_transformers_wrote_again(run, tmp_path):
    """After a fine-tuning: weights in a short type, no experiment."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert convert(run, tmp_path / "hf", "hf") == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").bfloat16().save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "tuned")
    assert convert(tmp_path / "tuned", tmp_path / "back", "run") == 0
    expected = {name: value.bfloat16().float() for name, value in weights(run).items()}
    found = weights(tmp_path / "back")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    shutil.rmtree(tmp_path / "back")
    (tmp_path / "tuned" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="which has no tokenizer; expected a model with one"):
        convert(tmp_path / "tuned", tmp_path / "back", "run")


def test_a_converted_run_says_why_it_cannot_be_resumed(single, tmp_path):
    convert(single, tmp_path / "back", "run")
    for which in ("last", "best", str(tmp_path / "back" / "checkpoints" / "best.safetensors")):
        with pytest.raises(
            CheckpointError, match=r"convert` made from .*model\.safetensors, .* with .*--init_from .*back`"
        ):
            resume_run(tmp_path / "back", checkpoint=which)


def test_a_model_without_a_tokenizer_takes_no_others_place(run, tmp_path):
    """Its weights would lie beside a tokenizer that they do not know."""
    convert(run, tmp_path / "hf", "hf")
    portable = _read_model(tmp_path / "hf")
    save_single_file(portable._replace(tokenizer=None), tmp_path / "bare.safetensors")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(ValueError, match=r"the tokenizer in .* is that of another model.*nothing was written"):
        convert(tmp_path / "bare.safetensors", tmp_path / "hf", "hf", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
