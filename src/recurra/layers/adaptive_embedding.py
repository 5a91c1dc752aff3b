"""Adaptive input embedding: fewer channels for rarer words (Baevski and Auli, arXiv 1809.10853, section 3)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.vocabulary import Clusters, require_tokens


class AdaptiveEmbedding(nn.Module):
    """Token ids to vectors times sqrt(d_model): x = sqrt(d_model) P_i E_i[t - first id of cluster i].

    Computes what Transformer-XL's own code does: with `div_val` 1 one table E serves all ids and P is left out where
    d_embedding = d_model; otherwise every cluster, the first included, has a table and a projection of its own.

    Args:
        vocab_size: ids.
        d_model: channels of the output.
        cutoffs: where the clusters end, increasing, without the vocabulary's own end.
        d_embedding: channels of the first cluster's vectors; `d_model` when None.
        div_val: what the channels are divided by from one cluster to the next.

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
        # Every table is asked for every token, with id 0 where the token is another's: tensors of fixed shapes, which a
        # compiler can trace, for a third more arithmetic at div_val 4. Ids past the last table stay as they are, so
        # that the look-up itself fails on them.
        x = self._look_up(0, tokens.where(tokens < self.clusters.bounds[0][1], 0))
        for table, (low, high) in enumerate(self.clusters.bounds[1:], start=1):
            mine = tokens >= low  # or a later table's, which then takes its turn
            asked = mine & (tokens < high) if table + 1 < len(self.tables) else mine
            x = torch.where(mine[..., None], self._look_up(table, (tokens - low).where(asked, 0)), x)
        return x * self.scale

    def _look_up(self, table: int, ids: Tensor) -> Tensor:
        vectors = functional.embedding(ids, self.tables[table])
        return functional.linear(vectors, self.projections[table]) if len(self.projections) else vectors
