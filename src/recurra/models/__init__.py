"""Models: stacks of layers under the one contract `y, state = module(x, state)`, imported when they are first used."""

from typing import TYPE_CHECKING, Any

from recurra.models.registry import (
    DataSizes,
    ModelConfig,
    ModelEntry,
    VideoSizes,
    entry_of,
    find_model,
    list_models,
    register_model,
)
from recurra.registry import find_public

if TYPE_CHECKING:
    from recurra.models.block import Block, MixerBlock
    from recurra.models.block_recurrent_transformer import (
        BlockRecurrentTransformer,
        BlockRecurrentTransformerConfig,
        BlockRecurrentTransformerState,
    )
    from recurra.models.compact_recurrent_transformer import (
        CompactRecurrentTransformer,
        CompactRecurrentTransformerConfig,
        CompactRecurrentTransformerState,
    )
    from recurra.models.compact_recurrent_vit import (
        CompactRecurrentViT,
        CompactRecurrentViTConfig,
        CompactRecurrentViTState,
    )
    from recurra.models.from_timesformer import load_timesformer
    from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
    from recurra.models.likelihood import negative_log_likelihood
    from recurra.models.pi_vit import PIViT, PIViTConfig, TaskLosses
    from recurra.models.recurrent_memory_transformer import (
        RecurrentMemoryTransformer,
        RecurrentMemoryTransformerConfig,
        RecurrentMemoryTransformerState,
    )
    from recurra.models.shell import LanguageModelShell
    from recurra.models.timesformer import TimeSformer, TimeSformerConfig, TimeSformerState
    from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState

__all__ = [
    "Block",
    "BlockRecurrentTransformer",
    "BlockRecurrentTransformerConfig",
    "BlockRecurrentTransformerState",
    "CompactRecurrentTransformer",
    "CompactRecurrentTransformerConfig",
    "CompactRecurrentTransformerState",
    "CompactRecurrentViT",
    "CompactRecurrentViTConfig",
    "CompactRecurrentViTState",
    "DataSizes",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelShell",
    "LanguageModelState",
    "MixerBlock",
    "ModelConfig",
    "ModelEntry",
    "PIViT",
    "PIViTConfig",
    "RecurrentMemoryTransformer",
    "RecurrentMemoryTransformerConfig",
    "RecurrentMemoryTransformerState",
    "TaskLosses",
    "TimeSformer",
    "TimeSformerConfig",
    "TimeSformerState",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLState",
    "VideoSizes",
    "entry_of",
    "find_model",
    "list_models",
    "load_timesformer",
    "negative_log_likelihood",
    "register_model",
]


def __getattr__(name: str) -> Any:
    globals()[name] = find_public(__name__, name)
    return globals()[name]
