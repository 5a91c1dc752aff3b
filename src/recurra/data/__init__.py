"""Data sets as numbered batches: the Memory Horizon task and text corpora; videos are in `recurra.data.video`."""

from recurra.data.batches import (
    IGNORED_TARGET,
    SPLITS,
    Batch,
    BatchSource,
    DataSet,
    LevelledSource,
    Split,
    TokenDataSet,
)
from recurra.data.bpe import BytePairEncoding
from recurra.data.corpus import TextCorpus, TextEncoder
from recurra.data.memory_horizon import memory_horizon_targets, memory_spans
from recurra.data.memory_horizon_data import MemoryHorizon, MemoryHorizonConfig
from recurra.data.text import TextConfig, TextData
from recurra.data.vocabulary import Vocabulary

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
    "TextEncoder",
    "TokenDataSet",
    "Vocabulary",
    "memory_horizon_targets",
    "memory_spans",
]
