from recurra.streams.continuation import GenerationConfig, TextEncoder, TextPieces
from recurra.streams.sampling import (
    SamplingConfig,
    apply_temperature,
    distribution,
    draw,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_generated,
    penalise_repetition,
    sample,
)
from recurra.streams.snapshot import ModelIdentity, Snapshot, StreamState, weights_fingerprint
from recurra.streams.speculation import Drafts, Speculation, accept
from recurra.streams.stream import Mark, Stream, Streams

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
    "TextEncoder",
    "TextPieces",
    "accept",
    "apply_temperature",
    "distribution",
    "draw",
    "greedy",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalise_generated",
    "penalise_repetition",
    "sample",
    "weights_fingerprint",
]
