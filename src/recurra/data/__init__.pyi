from recurra._choices import SPLITS, Split
from recurra.data.batches import (
    IGNORED_TARGET,
    Batch,
    BatchSource,
    DataSet,
    LevelledSource,
    TokenDataSet,
)
from recurra.data.corpus import TextCorpus
from recurra.data.memory_horizon import MemoryHorizon, MemoryHorizonConfig, memory_horizon_targets, memory_spans
from recurra.data.text import TextConfig, TextData
from recurra.data.tokenizers import BytePairEncoding, Vocabulary

__all__ = [
    "IGNORED_TARGET",
    "SPLITS",
    "Batch",
    "BatchSource",
    "BytePairEncoding",
    "DataSet",
    "LevelledSource",
    "MemoryHorizon",
    "MemoryHorizonConfig",
    "Split",
    "TextConfig",
    "TextCorpus",
    "TextData",
    "TokenDataSet",
    "Vocabulary",
    "memory_horizon_targets",
    "memory_spans",
]
