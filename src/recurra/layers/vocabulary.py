"""What a vocabulary allows: token ids, ignored targets, and the clusters that the rarer words are put into."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

IGNORED_TARGET = -100
"""The target of a position that does not count (torch's own `ignore_index`)."""


def require_tokens(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary.

    Looks at tensors on the CPU only, and not while a graph is being traced: elsewhere it would have to wait for the
    device, whose own look-up fails on such an id.

    Raises:
        IndexError: an id is negative, or not below `vocab_size`; the message names it.
    """
    if torch.compiler.is_compiling() or not tokens.is_cpu or not tokens.numel():
        return
    for token in map(int, tokens.aminmax()):
        if not 0 <= token < vocab_size:
            raise IndexError(f"{name} holds the id {token}; expected ids from 0 to {vocab_size - 1}")


def counted_tokens(tokens: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None, vocab_size: int) -> Tensor:
    """Give the tokens, with 0 for `IGNORED_TARGET` at padded places.

    Any other id must be in the vocabulary there, too: a mask that has slipped is found sooner.

    Raises:
        IndexError: a token is not in the vocabulary.
    """
    if mask is not None:
        tokens = tokens.masked_fill(~mask & (tokens == IGNORED_TARGET), 0)
        require_tokens("tokens", tokens, vocab_size)
    return tokens


def counted_targets(targets: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None) -> Tensor:
    """Give the targets, with `IGNORED_TARGET` where a step does not count."""
    return targets if mask is None else targets.masked_fill(~mask, IGNORED_TARGET)


@dataclass(frozen=True)
class Clusters:
    """A vocabulary, sorted by falling frequency, in clusters: cluster i holds the ids from cutoff i-1 up to cutoff i.

    Cluster 0 is the shortlist. The vectors of cluster i have d_embedding // div_val^i channels. With a div_val of 1 all
    clusters have the same number, and one table holds them all.

    Raises:
        ValueError: the cutoffs are not increasing numbers between 1 and vocab_size - 1, or a cluster is left without
            channels.
    """

    vocab_size: int
    d_embedding: int
    cutoffs: Sequence[int] = ()
    div_val: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_embedding", "div_val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        edges = [0, *self.cutoffs, self.vocab_size]
        if any(low >= high for low, high in itertools.pairwise(edges)):
            raise ValueError(
                f"cutoffs are {list(self.cutoffs)}; expected increasing numbers from 1 to {self.vocab_size - 1}, below "
                f"vocab_size = {self.vocab_size}"
            )
        if self.n_channels(len(self.cutoffs)) < 1:
            raise ValueError(
                f"div_val is {self.div_val}; d_embedding = {self.d_embedding} divided by {self.div_val}^"
                f"{len(self.cutoffs)} leaves the last cluster no channel"
            )

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first id of every cluster, and the one after its last."""
        edges = [0, *self.cutoffs, self.vocab_size]
        return list(itertools.pairwise(edges))

    @property
    def sizes(self) -> list[int]:
        """The ids in every cluster."""
        return [high - low for low, high in self.bounds]

    def n_channels(self, cluster: int) -> int:
        """The channels of the vectors of a cluster."""
        return self.d_embedding // self.div_val**cluster

    def tables(self) -> nn.ParameterList:
        """New vectors, drawn from N(0, 0.02^2): one table for all ids, or one for each cluster."""
        sizes = [self.vocab_size] if self.div_val == 1 else self.sizes
        return _drawn([(size, self.n_channels(table)) for table, size in enumerate(sizes)], std=0.02)

    def projections(self, d_model: int, n_projections: int) -> nn.ParameterList:
        """New matrices (d_model, channels) between vectors and model, drawn from N(0, 0.01^2).

        There are none where the vectors have `d_model` channels throughout.
        """
        if self.div_val == 1 and self.d_embedding == d_model:
            return nn.ParameterList()
        return _drawn([(d_model, self.n_channels(cluster)) for cluster in range(n_projections)], std=0.01)


def _drawn(shapes: list[tuple[int, int]], std: float) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(shape) * std) for shape in shapes)
