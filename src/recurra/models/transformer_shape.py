"""What the Transformers that read segments have in common: sizes, vocabulary and dropouts."""

from collections.abc import Collection
from dataclasses import dataclass, field

from recurra.layers.dropout import DROPOUTS
from recurra.models.transformer_xl_block import TRANSFORMER_XL_BLOCKS


def require_choices(config: object, choices: dict[str, Collection[str]]) -> None:
    """Raise a ValueError that names the field and what it may be, unless each has one of its choices."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} is {getattr(config, name)!r}; expected one of {', '.join(allowed)}")


@dataclass(kw_only=True)
class TransformerShape:
    """The shape of a Transformer's stack; the defaults are the published 16-layer WikiText-103 model's.

    Raises ValueError, naming the field, for a value that cannot be.
    """

    n_layer: int = 16
    """Blocks."""
    d_model: int = 410
    """Channels of the residual stream."""
    n_heads: int = 10
    """Heads of the attention."""
    d_head: int | None = None
    """Channels of a head; d_model / n_heads when None."""
    d_channel_mixing: int = 2100
    """Hidden channels of the feed-forward networks."""
    norm: str = "post"
    """Where the blocks have their norms: "post" as published, or "pre"."""
    cutoffs: list[int] = field(default_factory=list)
    """Where the clusters of the adaptive softmax end, for a vocabulary sorted by frequency; none for the plain one."""
    tie_embeddings: bool = True
    """Use the embedding's tables as the output's."""
    dropout: float = 0.1
    """Probability of dropping an activation: of the embedding, the position encoding, the blocks and the output."""
    dropout_over_time: str = "independent"
    """How those masks go over the steps of a call: "independent", or "locked", one mask for all (variational)."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    embedding_dropout: float = 0.0
    """Probability of dropping a word wherever it stands in a call."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "n_heads", "d_channel_mixing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("dropout", "attention_dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a probability from 0 up to, not including, 1"
                )
        require_choices(self, {"norm": TRANSFORMER_XL_BLOCKS, "dropout_over_time": DROPOUTS})
