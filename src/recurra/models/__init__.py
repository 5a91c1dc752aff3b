"""Models: stacks of layers under the one contract `y, state = module(x, state)`."""

from recurra.models.block import Block
from recurra.models.compact_recurrent_transformer import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentTransformerState,
)
from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from recurra.models.likelihood import PlainLikelihood, negative_log_likelihood
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState

__all__ = [
    "Block",
    "CompactRecurrentTransformer",
    "CompactRecurrentTransformerConfig",
    "CompactRecurrentTransformerState",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "PlainLikelihood",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLState",
    "negative_log_likelihood",
]
