"""Adaptive input embedding, with fewer channels for rarer words (Baevski and Auli, arXiv 1809.10853, section 3)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.vocabulary import Clusters, require_tokens


class AdaptiveEmbedding(nn.Module):
    """Embed token ids: x = sqrt(d_model) P_i E_i[t - first id of cluster i].

    This is what Transformer-XL's own code computes: if `div_val` is 1, all ids share one table E, and P is omitted if
    d_embedding = d_model; otherwise every cluster, including the first, has its own table and projection.

    Args:
        vocab_size: number of ids.
        d_model: channels of the output.
        cutoffs: ends of the clusters, increasing, without the end of the vocabulary.
        d_embedding: channels of the first cluster's vectors; `d_model` when None.
        div_val: factor by which the channels shrink from one cluster to the next.

    Raises:
        ValueError: see `Clusters`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        cutoffs: Sequence[int] = (),
        d_embedding: int | None = None,
        div_val: int = 1,
    ) -> None:
        super().__init__()
        self.clusters = Clusters(vocab_size, d_embedding or d_model, tuple(cutoffs), div_val)
        self.scale = d_model**0.5
        self.tables = self.clusters.tables()
        self.projections = self.clusters.projections(d_model, len(self.tables))

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Look the tokens up.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        require_tokens("tokens", tokens, self.clusters.vocab_size)
        if len(self.tables) == 1:
            return self._look_up(0, tokens) * self.scale
        # Every table looks up every token, with id 0 for tokens of other tables: this keeps all shapes fixed, so that a
        # compiler can trace it, for a third more arithmetic at div_val 4. Ids past the last table are kept, so that the
        # look-up itself fails on them.
        x = self._look_up(0, tokens.where(tokens < self.clusters.bounds[0][1], 0))
        for table, (low, high) in enumerate(self.clusters.bounds[1:], start=1):
            reached = tokens >= low  # in this table or a later one, which overwrites it in turn
            own = reached & (tokens < high) if table + 1 < len(self.tables) else reached
            x = torch.where(reached[..., None], self._look_up(table, (tokens - low).where(own, 0)), x)
        return x * self.scale

    def _look_up(self, table: int, ids: Tensor) -> Tensor:
        vectors = functional.embedding(ids, self.tables[table])
        return functional.linear(vectors, self.projections[table]) if len(self.projections) else vectors
