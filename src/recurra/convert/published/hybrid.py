"""What hybrid stacks have in common in transformers: RMS norms, SwiGLU networks, no biases, and a mixer a block."""

from collections.abc import Mapping, Sequence
from typing import Any

from recurra.convert.published.settings import Settings
from recurra.models import LanguageModelConfig


def hybrid_config(
    settings: Settings,
    mixers: Sequence[str],
    options: Mapping[str, dict[str, Any]],
    *,
    d_model: int,
    norm_epsilon: float,
    vocab_size: int,
    d_channel_mixing: int,
) -> LanguageModelConfig:
    """Take the sizes that all have, and make the model's shape.

    Args:
        settings: the entries of config.json.
        mixers: one for each block.
        options: those of each mixer, also of mixers that no block has.
        d_model, norm_epsilon: of the whole model.
        vocab_size, d_channel_mixing: what transformers takes where config.json does not say.
    """
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", vocab_size),
        n_layer=len(mixers),
        d_model=d_model,
        d_channel_mixing=settings.size("intermediate_size", d_channel_mixing),
        mixer=list(mixers),
        mixer_options={name: options[name] for name in dict.fromkeys(mixers)},
        feed_forward="swiglu",
        norm="rms",
        norm_epsilon=norm_epsilon,
        biases=False,
        tie_embeddings=settings.flag("tie_word_embeddings", False),
    )
