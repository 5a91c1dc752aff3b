"""What the configurations of the Transformers that read segments share: sizes, vocabulary and dropouts."""

from dataclasses import dataclass, field

from recurra.checks import require_at_least, require_choice, require_probability
from recurra.layers.attention_window import AttentionWindow
from recurra.layers.dropout import DROPOUTS
from recurra.layers.vocabulary import Clusters
from recurra.models.registry import ModelConfig, Size, from_data
from recurra.models.transformer_xl_block import TRANSFORMER_XL_BLOCKS


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """A Transformer's stack; the defaults are those of the published 16-layer WikiText-103 models, less their cutoffs.

    Raises ValueError, naming the field, for an impossible value.
    """

    vocab_size: Size = from_data()
    """Tokens, read and predicted; null: as many as the data have."""
    segment_length: Size = from_data()
    """Tokens of a segment; null: as in the data. Segments begin at the multiples of it, however a stream is cut."""
    n_layer: int = 16
    """Blocks."""
    d_model: int = 410
    """Channels of the residual stream."""
    n_heads: int = 10
    """Heads of the attention."""
    d_head: int | None = None
    """Channels of a head; d_model / n_heads if None."""
    d_channel_mixing: int = 2100
    """Hidden channels of the feed-forward networks."""
    norm: str = "post"
    """Where the blocks have their norms: "post" as published, or "pre"."""
    cutoffs: list[int] = field(default_factory=list)
    """Where the clusters of the adaptive softmax end, for a vocabulary sorted by frequency; none for the plain one."""
    tie_embeddings: bool = True
    """Use the embedding's tables as the output's."""
    dropout: float = 0.1
    """Probability of dropping an activation: of the blocks, of what enters and leaves them unless `input_dropout` and
    `output_dropout` say otherwise, and in Transformer-XL and the Block-Recurrent Transformer of position encodings."""
    input_dropout: float | None = None
    """Probability of dropping a channel of the embedding; `dropout` if None."""
    output_dropout: float | None = None
    """Probability of dropping a channel of what the output layer reads; `dropout` if None."""
    dropout_over_time: str = "independent"
    """How those masks vary over the steps of a call: "independent", or "locked", one mask for all (variational). Blocks
    that are called once for each segment, as those of CRT and RMT, draw one for each segment."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    embedding_dropout: float = 0.0
    """Probability of dropping a word wherever it stands in a call."""

    @property
    def entering_dropout(self) -> float:
        """Probability of dropping a channel of the embedding."""
        return self.dropout if self.input_dropout is None else self.input_dropout

    @property
    def leaving_dropout(self) -> float:
        """Probability of dropping a channel of what the output layer reads."""
        return self.dropout if self.output_dropout is None else self.output_dropout

    def __post_init__(self) -> None:
        require_at_least(
            1,
            n_layer=self.n_layer,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_channel_mixing=self.d_channel_mixing,
        )
        require_probability(
            dropout=self.dropout,
            input_dropout=self.entering_dropout,
            output_dropout=self.leaving_dropout,
            attention_dropout=self.attention_dropout,
            embedding_dropout=self.embedding_dropout,
        )
        require_choice(TRANSFORMER_XL_BLOCKS, norm=self.norm)
        require_choice(DROPOUTS, dropout_over_time=self.dropout_over_time)
        if self.segment_length is not None:
            AttentionWindow(self.segment_length, mem_len=0)
        if self.vocab_size is not None:
            Clusters(self.vocab_size, self.d_model, tuple(self.cutoffs), 1)
