"""Models beyond the machine's memory: refused with the number of bytes, before anything is allocated."""

import re

import pytest
import torch
from torch import nn

from recurra.models import (
    BlockRecurrentTransformer,
    BlockRecurrentTransformerConfig,
    DataSizes,
    LanguageModel,
    LanguageModelConfig,
    TransformerXL,
    TransformerXLConfig,
    room,
)

GIB = 2**30


@pytest.fixture(autouse=True)
def memory(monkeypatch) -> None:
    monkeypatch.setattr(room, "memory_bytes", lambda: GIB)


def config(**sizes) -> LanguageModelConfig:
    return LanguageModelConfig(**{"vocab_size": 10, "d_model": 8, "d_channel_mixing": 8, "mixer": "min-gru", **sizes})


def n_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 20_000},
        {"d_model": 10**7},
        {"d_channel_mixing": 10**9},
        {"vocab_size": 10**9},
        {"n_layer": 10**9},
        {"mixer": "gateloop", "mixer_options": {"d_qk": 10**9, "d_v": 10**9}},
    ],
)
def test_a_model_that_is_too_large_is_refused_with_its_bytes(sizes):
    name, size = next(iter((sizes.get("mixer_options") or sizes).items()))
    message = (
        rf"^model is one of [\d,]+ bytes of weights \(.*{name} {size}.*\); expected one that fits in the 1,073,741,"
    )
    with pytest.raises(ValueError, match=message):
        room.make_within_memory(LanguageModel, config(**sizes))


def test_sizes_beyond_counting():
    with pytest.raises(ValueError, match=r"one of more weights than can be counted \(d_model 10000000000, "):
        room.make_within_memory(LanguageModel, config(d_model=10**10))


@pytest.mark.parametrize("n_layer", [1, 2, 30])
@pytest.mark.parametrize("kind", ["language", "transformer-xl"])
def test_the_bytes_are_those_of_the_model(kind, n_layer, monkeypatch):
    monkeypatch.setattr(room, "_SMALL", 0)
    monkeypatch.setattr(room, "memory_bytes", lambda: 1)
    if kind == "language":
        make, chosen = LanguageModel, config(n_layer=n_layer)
    else:
        sizes = {"n_layer": n_layer, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8, "segment_length": 4}
        make, chosen = TransformerXL, TransformerXLConfig(vocab_size=10, **sizes)
    expected = n_bytes(make(chosen))
    with pytest.raises(ValueError, match=re.escape(f"one of {expected:,} bytes of weights")):
        room.make_within_memory(make, chosen)


def test_many_layers_of_which_one_is_named(monkeypatch):
    """A Block-Recurrent Transformer has one layer unlike the others, which a shorter one would not have."""
    monkeypatch.setattr(room, "_SMALL", 0)
    sizes = {"n_layer": 26, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8, "segment_length": 4}
    chosen = BlockRecurrentTransformerConfig(vocab_size=10, **sizes)
    assert chosen.number_of_recurrent_layer > 2
    made = room.make_within_memory(BlockRecurrentTransformer, chosen)
    monkeypatch.setattr(room, "memory_bytes", lambda: 1)
    with pytest.raises(ValueError, match=re.escape(f"one of {n_bytes(made):,} bytes of weights")):
        room.make_within_memory(BlockRecurrentTransformer, chosen)


def test_a_name_for_each_of_many_layers(monkeypatch):
    monkeypatch.setattr(room, "_SMALL", 0)
    chosen = config(n_layer=30, mixer=["min-gru", "lru"] * 15)
    assert n_bytes(room.make_within_memory(LanguageModel, chosen)) < GIB


def test_a_model_that_fits_is_the_same_with_a_look_and_without(monkeypatch):
    torch.manual_seed(0)
    expected = LanguageModel(config()).state_dict()
    monkeypatch.setattr(room, "_SMALL", 0)
    torch.manual_seed(0)
    found = room.make_within_memory(LanguageModel, config()).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_allocation_that_fails_is_told_with_its_bytes(monkeypatch):
    monkeypatch.setattr(room, "require_room", lambda make, config: None)
    with pytest.raises(ValueError, match=r"model is one for which [\d,]{15,} bytes could not be allocated \(d_model"):
        room.make_within_memory(LanguageModel, config(vocab_size=1, d_model=10**7))


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="something else"), room.memory_in_words(config()):
        raise RuntimeError("something else")


def test_a_recipe_is_refused_by_the_registry():
    chosen = LanguageModelConfig(n_layer=1, d_model=10**7, d_channel_mixing=8, mixer="min-gru")
    with pytest.raises(ValueError, match=r"model is one of [\d,]+ bytes of weights \(d_model 10000000, "):
        chosen.build(DataSizes(10, 10))
