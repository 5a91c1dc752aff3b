"""The registry of models: names, sizes, builds, errors, and what else reads it."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch import nn

from recurra.models.block_recurrent_transformer import BlockRecurrentTransformer
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformer
from recurra.models.registry import DataSizes, ModelEntry, VideoSizes, entry_of, find_model, list_models
from recurra.models.transformer_xl import TransformerXL
from recurra.video.crvit import CompactRecurrentViT
from recurra.video.pi_vit import PIViT
from recurra.video.timesformer import TimeSformer

NAMES = {
    "block-recurrent-transformer": BlockRecurrentTransformer,
    "crt": CompactRecurrentTransformer,
    "crvit": CompactRecurrentViT,
    "pi-vit": PIViT,
    "recurrent": LanguageModel,
    "rmt": RecurrentMemoryTransformer,
    "timesformer": TimeSformer,
    "transformer-xl": TransformerXL,
}
TOKENS, VIDEOS = DataSizes(13, 13, 5), VideoSizes(7, 2, 8)


def small(entry: ModelEntry) -> object:
    """The configuration of a registered model, as small as all of them can be."""
    known = {field.name for field in fields(entry.config)}
    sizes = {"n_layer": 1, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8, "patch_size": 4}
    return entry.config(**{name: size for name, size in sizes.items() if name in known})


def sizes_of(entry: ModelEntry) -> DataSizes | VideoSizes:
    return TOKENS if entry.is_language_model else VIDEOS


def test_names_are_sorted_and_lead_to_their_classes():
    assert {entry.name: entry.model for entry in list_models()} == NAMES
    assert [entry.name for entry in list_models()] == sorted(NAMES)
    assert [entry.name for entry in list_models(VideoSizes)] == ["crvit", "pi-vit", "timesformer"]
    assert {entry.name for entry in list_models(DataSizes)} == NAMES.keys() - {"crvit", "pi-vit", "timesformer"}
    for name, model in NAMES.items():
        assert find_model(name).model is model


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_builds_its_model_and_the_model_leads_back(name):
    entry = find_model(name)
    config, sizes = small(entry), sizes_of(entry)
    torch.manual_seed(3)
    model = config.build(sizes)
    assert type(model) is entry.model
    assert entry_of(model) is entry
    assert model.config == config.with_sizes(sizes)
    assert model.config.given_sizes() == {size: getattr(sizes, size) for size in config.sizes_from_data()}
    # Without its sizes, a configuration is what a recipe would set: it gives the same model again.
    torch.manual_seed(3)
    again = entry.config(**model.config.without_sizes()).build(sizes)
    assert again.config == model.config
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_needs_all_its_sizes_and_takes_no_others(name):
    entry = find_model(name)
    config, sizes = small(entry), sizes_of(entry)
    missing = "vocab_size" if entry.is_language_model else "n_classes"
    with pytest.raises(
        ValueError, match=rf"{missing} is None; expected a number, to make a model of a {type(config).__name__}"
    ):
        entry.model(config)
    with pytest.raises(ValueError, match=rf"{missing} is 3; expected {getattr(sizes, missing)}, as in the data"):
        replace(config, **{missing: 3}).with_sizes(sizes)
    filled = config.with_sizes(sizes)
    assert filled.with_sizes(sizes) == filled
    with pytest.raises(FrozenInstanceError):
        filled.n_layer = 2


@pytest.mark.parametrize(("name", "sizes"), [("recurrent", VIDEOS), ("timesformer", TOKENS)])
def test_sizes_of_other_data_are_refused(name, sizes):
    expected = "DataSizes" if sizes is VIDEOS else "VideoSizes"
    with pytest.raises(TypeError, match=rf"sizes is a {type(sizes).__name__}; expected {expected} for model"):
        small(find_model(name)).build(sizes)


def test_a_model_of_segments_needs_their_length():
    with pytest.raises(ValueError, match="segment_length is None; expected data with segments, which this model reads"):
        small(find_model("transformer-xl")).build(DataSizes(5, 5))
    assert small(find_model("recurrent")).build(DataSizes(5, 5)).config.vocab_size == 5


def test_models_that_are_not_registered_have_no_entry():
    class Mine(LanguageModel):
        pass

    for model in (nn.Linear(2, 2), Mine(LanguageModelConfig(5, n_layer=1, d_model=4))):
        with pytest.raises(TypeError, match=rf"model is a {type(model).__name__}; expected one of .*LanguageModel"):
            entry_of(model)
