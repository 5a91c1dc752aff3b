"""init_from for language models: what it reads, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from recurra.convert.portable import PortableModel, save_single_file
from recurra.data.tokenizers import Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.train.formats import _save_run
from recurra.train.tasks.text import start_language_model

WORDS = Vocabulary.from_text(["a cat and a dog\n"])
CONFIG = LanguageModelConfig(len(WORDS), len(WORDS), n_layer=2, d_model=8, d_channel_mixing=8, mixer=["s5", "min-gru"])


def fresh(config=CONFIG) -> LanguageModel:
    return LanguageModel(config).eval()


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def trained(tmp_path):
    """A model in a single file and as a run."""
    model = fresh()
    portable = PortableModel(model, WORDS)
    save_single_file(portable, tmp_path / "model.safetensors")
    _save_run(portable, tmp_path / "run", target=tmp_path / "run", source=tmp_path / "model.safetensors")
    return model


@pytest.mark.parametrize("place", ["model.safetensors", "run", "run/checkpoints/best.safetensors"])
def test_a_model_starts_with_all_weights(trained, tmp_path, place):
    model = fresh(replace(CONFIG, dropout=0.5))
    assert not equal(model, trained)
    line = start_language_model(model, str(tmp_path / place))
    assert equal(model, trained)
    assert line.startswith(f"starts from {tmp_path / place.split('/')[0]}")


def test_a_published_model_with_tied_embeddings_has_an_output_for_each_token(tmp_path):
    published = fresh(replace(CONFIG, output_size=None, tie_embeddings=True))
    save_single_file(PortableModel(published, WORDS), tmp_path / "model.safetensors")
    model = fresh(replace(CONFIG, tie_embeddings=True))
    start_language_model(model, str(tmp_path / "model.safetensors"))
    assert equal(model, published)


def test_models_of_another_shape_are_refused(trained, tmp_path):
    file = str(tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"a model with n_layer 2, not 1; mixer \['s5', 'min-gru'\], not \['s5'\]; exp"
    ):
        start_language_model(fresh(replace(CONFIG, n_layer=1, mixer=["s5"])), file)
    other = TransformerXL(TransformerXLConfig(vocab_size=6, n_layer=2, d_model=8, n_heads=2, segment_length=4))
    with pytest.raises(ValueError, match=r"a model with d_channel_mixing 8, not 2100; .* expected one of"):
        start_language_model(other, str(tmp_path / "run"))


@pytest.mark.parametrize("place", ["model.safetensors", "run"])
def test_a_vocabulary_of_the_same_size_is_another(trained, tmp_path, place):
    model, file = fresh(), str(tmp_path / place)
    assert start_language_model(model, file, WORDS)
    other = Vocabulary.from_text(["a cat and a hen\n"])
    assert len(other) == len(WORDS)
    with pytest.raises(ValueError, match="is a model with another vocabulary of the same size; expected that of the d"):
        start_language_model(model, file, other)
    (tmp_path / "run" / "tokenizer.json").unlink()
    if place != "model.safetensors":  # nothing to compare with
        assert start_language_model(model, file, other)


def test_dropouts_of_mixers_may_differ(tmp_path):
    def config(**options):
        named = {"rotary-attention": {"n_heads": 2, **options}}
        return replace(CONFIG, mixer=["s5", "rotary-attention"], mixer_options=named)

    trained = fresh(config())
    save_single_file(PortableModel(trained, WORDS), tmp_path / "model.safetensors")
    model = fresh(config(dropout=0.1))
    start_language_model(model, str(tmp_path / "model.safetensors"))
    assert equal(model, trained)
    with pytest.raises(ValueError, match="mixer_options"):
        start_language_model(fresh(config(window=3)), str(tmp_path / "model.safetensors"))
