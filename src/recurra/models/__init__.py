"""Models: stacks of layers under the one contract `y, state = module(x, state)`."""

from recurra.models.block import Block, MixerBlock
from recurra.models.block_recurrent_transformer import (
    BlockRecurrentTransformer,
    BlockRecurrentTransformerConfig,
    BlockRecurrentTransformerShape,
    BlockRecurrentTransformerState,
)
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
from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelShape, LanguageModelState
from recurra.models.likelihood import negative_log_likelihood
from recurra.models.pi_vit import PIViT, PIViTConfig, PIViTShape, TaskLosses
from recurra.models.recurrent_memory_transformer import (
    RecurrentMemoryTransformer,
    RecurrentMemoryTransformerConfig,
    RecurrentMemoryTransformerShape,
    RecurrentMemoryTransformerState,
)
from recurra.models.registry import (
    DataSizes,
    ModelEntry,
    VideoSizes,
    entry_of,
    find_model,
    list_models,
    register_model,
)
from recurra.models.shell import LanguageModelShell
from recurra.models.timesformer import TimeSformer, TimeSformerConfig, TimeSformerShape, TimeSformerState
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLShape, TransformerXLState

__all__ = [
    "Block",
    "BlockRecurrentTransformer",
    "BlockRecurrentTransformerConfig",
    "BlockRecurrentTransformerShape",
    "BlockRecurrentTransformerState",
    "CompactRecurrentTransformer",
    "CompactRecurrentTransformerConfig",
    "CompactRecurrentTransformerShape",
    "CompactRecurrentTransformerState",
    "CompactRecurrentViT",
    "CompactRecurrentViTConfig",
    "CompactRecurrentViTShape",
    "CompactRecurrentViTState",
    "DataSizes",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelShape",
    "LanguageModelShell",
    "LanguageModelState",
    "MixerBlock",
    "ModelEntry",
    "PIViT",
    "PIViTConfig",
    "PIViTShape",
    "RecurrentMemoryTransformer",
    "RecurrentMemoryTransformerConfig",
    "RecurrentMemoryTransformerShape",
    "RecurrentMemoryTransformerState",
    "TaskLosses",
    "TimeSformer",
    "TimeSformerConfig",
    "TimeSformerShape",
    "TimeSformerState",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLShape",
    "TransformerXLState",
    "VideoSizes",
    "entry_of",
    "find_model",
    "list_models",
    "load_timesformer",
    "negative_log_likelihood",
    "register_model",
]
