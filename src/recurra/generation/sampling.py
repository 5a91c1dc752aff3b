"""How the next token is chosen: a choice of settings, and the functions of this package in their order."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.generation.choice import draw, greedy
from recurra.generation.min_p import keep_min_p
from recurra.generation.repetition import penalise_repetition
from recurra.generation.temperature import apply_temperature
from recurra.generation.top_k import keep_top_k
from recurra.generation.top_p import keep_top_p

RECENT_TOKENS = 64
"""How many of its last tokens a stream remembers: as far back as a repetition penalty looks."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen; the default draws by the model's own probabilities.

    The settings apply in the order in which they stand here, each to what the one before has left.

    Raises ValueError, naming the field, for a value that cannot be, and for one that would have no effect.
    """

    repetition_penalty: float = 1.0
    """Above 1: tokens among the last ones become less likely (see `penalise_repetition`)."""
    repetition_window: int = RECENT_TOKENS
    """How many of the last tokens, those that were fed included, count for that; at most 64."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that hold this share of the probability."""
    min_p: float | None = None
    """Draw among tokens that are at least this many times as likely as the likeliest."""

    def __post_init__(self) -> None:
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "a number above 0")
        _require(
            1 <= self.repetition_window <= RECENT_TOKENS,
            "repetition_window",
            self.repetition_window,
            f"from 1 to {RECENT_TOKENS}",
        )
        _require(self.temperature >= 0, "temperature", self.temperature, "0, for the likeliest token, or above")
        for name in ("repetition_penalty", "temperature"):
            _require(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _require(value is None or 0 < value <= 1, name, value, "a share above 0 and up to 1")
        without_effect = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and without_effect:
            raise ValueError(
                f"temperature is 0, which takes the likeliest token: {', '.join(without_effect)} would have no effect; "
                "leave it away, or set a temperature above 0"
            )


def sample(
    logits: Float[Tensor, "*batch V"],
    config: SamplingConfig,
    generator: torch.Generator,
    recent: Int[Tensor, "*batch n"] | None = None,
) -> Int[Tensor, "*batch"]:
    """Choose a token for every row.

    Args:
        logits: what the model gives after the last token.
        config: how to choose.
        generator: the only source of chance, on the logits' device; not used at a temperature of 0.
        recent: the last tokens of every row, oldest first, for the repetition penalty; None for none.

    Raises:
        ValueError: there is no token to choose (see `draw`).
    """
    if recent is not None and config.repetition_penalty != 1:
        window = recent[..., max(0, recent.shape[-1] - config.repetition_window) :]
        logits = penalise_repetition(logits, window, config.repetition_penalty)
    if config.temperature == 0:
        return greedy(logits)
    logits = apply_temperature(logits, config.temperature)
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    return draw(logits, generator)


def _require(holds: bool, field: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{field} is {value}; expected {expected}")
