"""Every kind of language model, small, in float64 for tight tolerances."""

from collections.abc import Callable

import pytest
import torch
from tests.contracts.conftest import OPTIONS
from torch import nn

import recurra
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY = 23
SEGMENT = 5


def _language_model(mixer: str) -> nn.Module:
    config = LanguageModelConfig(VOCABULARY, None, 2, 12, 16, mixer=mixer, mixer_options=OPTIONS.get(mixer, {}))
    return LanguageModel(config)


def _shape(**options) -> dict:
    sizes = {"n_layer": 2, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16}
    return {"vocab_size": VOCABULARY, "segment_length": SEGMENT, **sizes, **options}


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{mixer: lambda mixer=mixer: _language_model(mixer) for mixer in recurra.list_mixers()},
    "transformer-xl": lambda: TransformerXL(TransformerXLConfig(**_shape(mem_len=4))),
    "transformer-xl-adaptive": lambda: TransformerXL(TransformerXLConfig(**_shape(cutoffs=[5, 11], div_val=2))),
    "crt-gru": lambda: CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**_shape())),
    "crt-ncgru-adaptive": lambda: CompactRecurrentTransformer(
        CompactRecurrentTransformerConfig(**_shape(memory="ncgru", position="rnn-ncgru", cutoffs=[7]))
    ),
    "crt-relative": lambda: CompactRecurrentTransformer(
        CompactRecurrentTransformerConfig(**_shape(position="relative"))
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double().eval()


SAMPLE = {
    *("gateloop", "gateloop-attention", "gated-delta-net", "gru", "hyena", "mamba", "performer", "s4d"),
    *("relative-attention", "transformer-xl-adaptive", "crt-ncgru-adaptive", "crt-relative"),
}
"""One of every kind of state; the others are tested with `-m slow`."""
EVERY_KIND = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in MODELS]


@pytest.fixture(params=EVERY_KIND)
def any_model(request) -> nn.Module:
    """Every kind."""
    return build(request.param)


@pytest.fixture(params=["gateloop", "gateloop-attention", "transformer-xl-adaptive", "crt-ncgru-adaptive"])
def model(request) -> nn.Module:
    """One of each kind of state: a recurrence, a window, segments with a memory of states, or of a vector."""
    return build(request.param)


@pytest.fixture
def gateloop() -> nn.Module:
    return build("gateloop")


@pytest.fixture
def crt() -> nn.Module:
    return build("crt-gru")


TEXT = "a cat and a dog\nthe dog saw a cat in the garden of the house\nnaïve façade — 日本語 🙂\n" * 4


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    return Vocabulary.from_text([TEXT])


@pytest.fixture(scope="session")
def bpe() -> BytePairEncoding:
    return BytePairEncoding.train([TEXT], 270)
