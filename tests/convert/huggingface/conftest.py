"""Every kind of state under transformers' interface, small and in float64."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recurra.convert.huggingface.modeling import RecurraForCausalLM, causal_lm
from recurra.models.block_recurrent_transformer import BlockRecurrentTransformer, BlockRecurrentTransformerConfig
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformer, RecurrentMemoryTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY = 23
SEGMENT = 5


def _language_model(mixer, **options) -> nn.Module:
    return LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 12, 16, mixer=mixer, **options))


def _shape(**options) -> dict:
    sizes = {"n_layer": 2, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16}
    return {"vocab_size": VOCABULARY, "segment_length": SEGMENT, **(sizes | options)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gateloop": lambda: _language_model("gateloop", tie_embeddings=True),
    "hybrid": lambda: _language_model(
        ["s5", "gateloop-attention"], mixer_options={"gateloop-attention": {"window": 5}}
    ),
    "transformer-xl": lambda: TransformerXL(TransformerXLConfig(**_shape(cutoffs=[5, 11], div_val=2))),
    "crt-gru": lambda: CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**_shape())),
    "crt-ncgru-adaptive": lambda: CompactRecurrentTransformer(
        CompactRecurrentTransformerConfig(**_shape(n_layer=1, memory="ncgru", position="rnn-ncgru", cutoffs=[7]))
    ),
    "rmt": lambda: RecurrentMemoryTransformer(RecurrentMemoryTransformerConfig(**_shape(n_memory=2, n_heads=3))),
    "block-recurrent": lambda: BlockRecurrentTransformer(BlockRecurrentTransformerConfig(**_shape(n_states=3))),
}


def build(name: str) -> RecurraForCausalLM:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # unlike tokens: fresh logits of Transformer-XL are all alike
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return causal_lm(model)


@pytest.fixture(params=["gateloop", "hybrid", "crt-ncgru-adaptive"])
def lm(request) -> RecurraForCausalLM:
    return build(request.param)


@pytest.fixture(params=MODELS)
def every_lm(request) -> RecurraForCausalLM:
    """Every model; `lm` is a sample."""
    return build(request.param)


@pytest.fixture
def gateloop() -> RecurraForCausalLM:
    return build("gateloop")


@pytest.fixture
def prompt() -> Tensor:
    """Three rows that end inside of a second segment."""
    return torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_warnings(caplog):
    """What transformers finds strange about the models would be a mistake of ours."""
    logger = logging.getLogger("transformers")
    logger.propagate = True
    yield
    logger.propagate = False
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    usual = ("right-padding", "torch_dtype")  # said of every model
    assert not [text for text in warned if not any(word in text for word in usual)], warned


@torch.no_grad()
def greedy(lm: RecurraForCausalLM, row: Tensor, n: int) -> list[int]:
    """The likeliest tokens after a row, each from the logits of the whole text."""
    text = row.tolist()
    for _ in range(n):
        text.append(int(lm.model(torch.tensor([text]))[0][0, -1].argmax()))
    return text[len(row) :]
