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
from recurra.models.language_model import Block, LanguageModel, LanguageModelConfig, LanguageModelState, MixerBlock
from recurra.models.recurrent_memory_transformer import (
    RecurrentMemoryTransformer,
    RecurrentMemoryTransformerConfig,
    RecurrentMemoryTransformerState,
)
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
from recurra.models.shell import LanguageModelShell, negative_log_likelihood
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState
from recurra.video.crvit import (
    CompactRecurrentViT,
    CompactRecurrentViTConfig,
    CompactRecurrentViTState,
    load_timesformer,
)
from recurra.video.pi_vit import PIViT, PIViTConfig, TaskLosses
from recurra.video.timesformer import TimeSformer, TimeSformerConfig, TimeSformerState

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
