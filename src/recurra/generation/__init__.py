"""Streams through a trained language model: feeding, sampling, saving, and many of them at once."""

from recurra.generation.generating import GenerationConfig
from recurra.generation.model_identity import ModelIdentity, weights_fingerprint
from recurra.generation.sampling import (
    SamplingConfig,
    apply_temperature,
    draw,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    sample,
)
from recurra.generation.snapshot import Snapshot
from recurra.generation.stream import Stream
from recurra.generation.stream_state import StreamState
from recurra.generation.streams import Streams
from recurra.generation.text import TextPieces

__all__ = [
    "GenerationConfig",
    "ModelIdentity",
    "SamplingConfig",
    "Snapshot",
    "Stream",
    "StreamState",
    "Streams",
    "TextPieces",
    "apply_temperature",
    "draw",
    "greedy",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalise_repetition",
    "sample",
    "weights_fingerprint",
]
