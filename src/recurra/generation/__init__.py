"""Streams through a trained language model: feeding, sampling, saving, and many of them at once."""

from recurra.generation.choice import draw, greedy
from recurra.generation.min_p import keep_min_p
from recurra.generation.model_identity import ModelIdentity, weights_fingerprint
from recurra.generation.repetition import penalise_repetition
from recurra.generation.sampling import SamplingConfig, sample
from recurra.generation.snapshot import Snapshot
from recurra.generation.stream import Stream
from recurra.generation.streams import Streams
from recurra.generation.temperature import apply_temperature
from recurra.generation.text_pieces import TextPieces
from recurra.generation.top_k import keep_top_k
from recurra.generation.top_p import keep_top_p

__all__ = [
    "ModelIdentity",
    "SamplingConfig",
    "Snapshot",
    "Stream",
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
