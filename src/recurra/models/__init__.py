"""Models: stacks of layers under the one contract `y, state = module(x, state)`."""

from recurra.models.block import Block
from recurra.models.compact_recurrent_transformer import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentTransformerShape,
    CompactRecurrentTransformerState,
)
from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from recurra.models.likelihood import PlainLikelihood, negative_log_likelihood
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLShape, TransformerXLState

__all__ = [
    "Block",
    "CompactRecurrentTransformer",
    "CompactRecurrentTransformerConfig",
    "CompactRecurrentTransformerShape",
    "CompactRecurrentTransformerState",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "PlainLikelihood",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLShape",
    "TransformerXLState",
    "negative_log_likelihood",
]
