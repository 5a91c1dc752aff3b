"""Token ids checked, and embeddings with fewer channels for rarer words (Baevski and Auli, arXiv 1809.10853)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import kind_of, require, require_at_least, require_shape, sentence
from recurra.ops._operator import transforms_are_active

IGNORED_TARGET = -100
"""The target of a position without one (torch's default `ignore_index`)."""


def require_tokens(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary, on the CPU alone, and neither in traces nor under torch.func.

    Elsewhere it would have to wait for the device, where the look-up itself fails on such an id.
    """
    if torch.compiler.is_compiling() or transforms_are_active() or not tokens.is_cpu or not tokens.numel():
        return
    for token in map(int, tokens.aminmax()):
        if not 0 <= token < vocab_size:
            raise IndexError(sentence(name, f"a tensor with the id {token}", f"ids from 0 to {vocab_size - 1}"))


def require_targets(targets: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse targets of another shape, and what is no index of a class: a mask has their shape, too."""
    require_shape("targets", targets, shape)
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(sentence("targets", kind_of(targets), "int64 or int32"))


def counted_tokens(tokens: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None, vocab_size: int) -> Tensor:
    """Replace `IGNORED_TARGET` by 0 at masked positions; other ids must be in the vocabulary even there."""
    if mask is not None:
        tokens = tokens.masked_fill(~mask & (tokens == IGNORED_TARGET), 0)
        require_tokens("tokens", tokens, vocab_size)
    return tokens


def counted_targets(targets: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None) -> Tensor:
    """Replace the targets of masked steps by `IGNORED_TARGET`."""
    return targets if mask is None else targets.masked_fill(~mask, IGNORED_TARGET)


def few_targets(n_targets: int, targets: Int[Tensor, "B L"]) -> bool:
    """Say whether those that count are so few, no more than a fourth, that logits should be formed only there."""
    return 4 * n_targets <= targets.numel()


@dataclass(frozen=True)
class Clusters:
    """A vocabulary, sorted by falling frequency, in clusters: cluster i holds the ids from cutoff i-1 up to cutoff i.

    Cluster 0 is the shortlist. The vectors of cluster i have d_embedding // div_val^i channels. If `div_val` is 1, all
    clusters have the same number of channels and share one table.
    """

    vocab_size: int
    d_embedding: int
    cutoffs: Sequence[int] = ()
    div_val: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, vocab_size=self.vocab_size, d_embedding=self.d_embedding, div_val=self.div_val)
        increasing = all(low < high for low, high in self.bounds)
        last = self.vocab_size - 1
        require(increasing, "cutoffs", list(self.cutoffs), f"increasing numbers from 1 to {last}, below vocab_size")
        rarest = len(self.cutoffs)
        hint = f"d_embedding = {self.d_embedding} divided by {self.div_val}^{rarest} is below 1"
        fits = self.n_channels(rarest) >= 1
        require(fits, "div_val", self.div_val, "a number that leaves each cluster channels", hint)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first id of each cluster and the id after its last."""
        edges = [0, *self.cutoffs, self.vocab_size]
        return list(itertools.pairwise(edges))

    @property
    def sizes(self) -> list[int]:
        """The number of ids in each cluster."""
        return [high - low for low, high in self.bounds]

    def n_channels(self, cluster: int) -> int:
        """The channels of a cluster's vectors."""
        return self.d_embedding // self.div_val**cluster

    def tables(self) -> nn.ParameterList:
        """Draw new vectors from N(0, 0.02^2): one table for all ids, or one per cluster."""
        sizes = [self.vocab_size] if self.div_val == 1 else self.sizes
        return _drawn([(size, self.n_channels(table)) for table, size in enumerate(sizes)], std=0.02)

    def projections(self, d_model: int, n_projections: int) -> nn.ParameterList:
        """Draw new matrices (d_model, channels) between vectors and model from N(0, 0.01^2).

        The list is empty if all vectors have `d_model` channels.
        """
        if self.div_val == 1 and self.d_embedding == d_model:
            return nn.ParameterList()
        return _drawn([(d_model, self.n_channels(cluster)) for cluster in range(n_projections)], std=0.01)


def _drawn(shapes: list[tuple[int, int]], std: float) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(shape) * std) for shape in shapes)


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
