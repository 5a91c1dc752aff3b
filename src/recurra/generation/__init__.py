"""Streams through a trained language model: feeding, sampling, speculating, saving, and many of them at once."""

from recurra.generation.continuation import GenerationConfig, TextPieces
from recurra.generation.sampling import (
    SamplingConfig,
    apply_temperature,
    distribution,
    draw,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    sample,
)
from recurra.generation.snapshot import ModelIdentity, Snapshot, StreamState, weights_fingerprint
from recurra.generation.speculation import Drafts, Speculation, accept
from recurra.generation.stream import Mark, Stream
from recurra.generation.streams import Streams

__all__ = [
    "Drafts",
    "GenerationConfig",
    "Mark",
    "ModelIdentity",
    "SamplingConfig",
    "Snapshot",
    "Speculation",
    "Stream",
    "StreamState",
    "Streams",
    "TextPieces",
    "accept",
    "apply_temperature",
    "distribution",
    "draw",
    "greedy",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalise_repetition",
    "sample",
    "weights_fingerprint",
]
