"""Models: stacks of layers under the one contract `y, state = module(x, state)`."""

from recurra.models.block import Block
from recurra.models.compact_recurrent_transformer import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentTransformerShape,
    CompactRecurrentTransformerState,
)
from recurra.models.compact_recurrent_vit import (
    CompactRecurrentViT,
    CompactRecurrentViTConfig,
    CompactRecurrentViTShape,
    CompactRecurrentViTState,
)
from recurra.models.from_timesformer import load_timesformer
from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from recurra.models.likelihood import PlainLikelihood, negative_log_likelihood
from recurra.models.timesformer import TimeSformer, TimeSformerConfig, TimeSformerShape, TimeSformerState
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLShape, TransformerXLState

__all__ = [
    "Block",
    "CompactRecurrentTransformer",
    "CompactRecurrentTransformerConfig",
    "CompactRecurrentTransformerShape",
    "CompactRecurrentTransformerState",
    "CompactRecurrentViT",
    "CompactRecurrentViTConfig",
    "CompactRecurrentViTShape",
    "CompactRecurrentViTState",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "PlainLikelihood",
    "TimeSformer",
    "TimeSformerConfig",
    "TimeSformerShape",
    "TimeSformerState",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLShape",
    "TransformerXLState",
    "load_timesformer",
    "negative_log_likelihood",
]
