"""Ends of a language model: the adaptive softmax (Grave et al., arXiv 1609.04309), and those with a factor or bound."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.cross_entropy import cross_entropy
from recurra.layers.embeddings import IGNORED_TARGET, AdaptiveEmbedding, Clusters, require_tokens
from recurra.layers.feed_forward import TiedLinear
from recurra.layers.norms import at_least_float32


class AdaptiveSoftmax(nn.Module):
    """p(t) for a token t of the shortlist, p(cluster i) p(t | cluster i) for a token of cluster i.

    The head is one softmax over the shortlist and the clusters; the logits of cluster i are W_i P_i^T h + b_i. Without
    cutoffs this is the plain softmax. The head holds the clusters in order, as Transformer-XL's TensorFlow code does;
    its PyTorch code reads them from last to first.

    Args:
        vocab_size: number of ids.
        d_model: channels of the hidden states.
        cutoffs: ends of the clusters, increasing, without the end of the vocabulary.
        d_embedding: channels of the first cluster's vectors; `d_model` when None.
        div_val: factor by which the channels shrink from one cluster to the next.

    Raises:
        ValueError: see `Clusters`.
    """

    cluster_weight: nn.Parameter | None
    cluster_bias: nn.Parameter | None

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
        n_clusters = len(self.clusters.cutoffs)
        self.tables = self.clusters.tables()
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(len(table))) for table in self.tables)
        self.projections = self.clusters.projections(d_model, 1 + n_clusters)
        self.cluster_weight = self.cluster_bias = None
        if n_clusters:
            self.cluster_weight = nn.Parameter(torch.randn(n_clusters, self.clusters.d_embedding) * 0.02)
            self.cluster_bias = nn.Parameter(torch.zeros(n_clusters))

    def tie_tables(self, embedding: AdaptiveEmbedding) -> None:
        """Share the vectors of `embedding`, which must have the same clusters."""
        # Share the parameters, not their list: torch.func.functional_call restores each parameter that it replaced, and
        # in a shared list it would restore its own replacement.
        self.tables = nn.ParameterList(embedding.tables)

    def tie_projections(self, embedding: AdaptiveEmbedding, which: Sequence[bool]) -> None:
        """Share the projections of `embedding` for the clusters where `which` is True, if it has projections."""
        for cluster in range(len(self.projections)):
            if which[cluster]:
                # with one table there is one projection, shared by all clusters
                self.projections[cluster] = embedding.projections[cluster if len(self.tables) > 1 else 0]

    def forward(self, hidden: Float[Tensor, "*N d_model"]) -> Float[Tensor, "*N vocabulary"]:
        """Return the logits of every token; with cutoffs these are log-probabilities."""
        return self._head(hidden) if self.cluster_weight is None else self.log_probabilities(hidden)

    @property
    def weight(self) -> Tensor:
        """The matrix of a plain softmax, one without cutoffs and projections: logits are weight h + bias."""
        if self.cluster_weight is not None or len(self.projections):
            raise AttributeError("an adaptive softmax has no one matrix")
        return self.tables[0]

    @property
    def bias(self) -> Tensor:
        """The biases of a plain softmax."""
        return self.biases[0]

    def log_probabilities(self, hidden: Float[Tensor, "*N d_model"]) -> Float[Tensor, "*N vocabulary"]:
        """Return the log-probability of every token, in float32 or better."""
        columns = [self.clusters.sizes[0], *[1] * len(self.clusters.cutoffs)]
        shortlist, *clusters = _log_softmax(self._head(hidden)).split(columns, -1)
        tails = (_log_softmax(self._logits(i, hidden, weight, bias)) for i, weight, bias in self._tails())
        return torch.cat([shortlist, *(cluster + tail for cluster, tail in zip(clusters, tails))], -1)

    def loss(self, hidden: Float[Tensor, "N d_model"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Return the negative log-likelihood of every target in nats, in float32 or better, without the full softmax.

        A cluster's softmax is computed only at the positions whose target lies in that cluster.

        Args:
            hidden: the hidden states.
            targets: token ids; `IGNORED_TARGET` gives 0.

        Raises:
            IndexError: a target is not in the vocabulary.
        """
        require_tokens("targets", targets.where(targets != IGNORED_TARGET, 0), self.clusters.vocab_size)
        tails = self._tails()
        head_targets = targets
        for cluster, (low, _) in enumerate(self.clusters.bounds[1:]):
            head_targets = torch.where(targets >= low, self.clusters.sizes[0] + cluster, head_targets)
        losses = cross_entropy(self._head(hidden), head_targets)
        for (low, high), (cluster, weight, bias) in zip(self.clusters.bounds[1:], tails):
            rows = ((targets >= low) & (targets < high)).nonzero().squeeze(1)
            logits = self._logits(cluster, hidden[rows], weight, bias)
            losses = losses.index_add(0, rows, cross_entropy(logits, targets[rows] - low))
        return losses

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        """Vectors and biases of each cluster. One table is split in one call: slices would each get a full gradient."""
        if len(self.tables) > 1:
            return list(zip(self.tables, self.biases))
        sizes = self.clusters.sizes
        return list(zip(self.tables[0].split(sizes), self.biases[0].split(sizes)))

    def _tails(self) -> list[tuple[int, Tensor, Tensor]]:
        return [(cluster, *part) for cluster, part in enumerate(self._parts())][1:]

    def _head(self, hidden: Tensor) -> Tensor:
        weight, bias = self._parts()[0]
        if self.cluster_weight is not None and self.cluster_bias is not None:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return self._logits(0, hidden, weight, bias)

    def _logits(self, cluster: int, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if len(self.projections):
            hidden = hidden @ self.projections[cluster]
        return functional.linear(hidden, weight, bias)


def _log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(at_least_float32(logits), -1)


class ScaledEmbedding(nn.Embedding):
    """An embedding times a constant: Gemma and Griffin multiply theirs, which is the head too, by sqrt(d_model)."""

    def __init__(self, n_tokens: int, d_model: int, scale: float) -> None:
        super().__init__(n_tokens, d_model)
        self.embed_scale = scale  # by this name peft finds it

    def forward(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d_model"]:
        """Look tokens up and scale what is found."""
        return super().forward(tokens) * self.embed_scale


class ScaledHead(nn.Module):
    """scale * W x: logits times a constant, as in models that are scaled by muP (Yang et al., arXiv 2203.03466)."""

    def __init__(self, linear: nn.Linear | TiedLinear, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, hidden: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape classes"]:
        """Compute scaled logits."""
        return self.scale * self.linear(hidden)

    @property
    def weight(self) -> Tensor:
        """The matrix, without the scale."""
        return self.linear.weight


class CappedHead(nn.Module):
    """cap * tanh(W x / cap): logits that stay between -cap and cap, above 0 (Griffin, arXiv 2402.19427)."""

    def __init__(self, linear: nn.Linear | TiedLinear | ScaledHead, cap: float) -> None:
        super().__init__()
        self.linear, self.cap = linear, cap

    def forward(self, hidden: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape classes"]:
        """Compute bounded logits."""
        return self.cap * (self.linear(hidden) / self.cap).tanh()

    @property
    def weight(self) -> Tensor:
        """The matrix, as of a head without a bound."""
        return self.linear.weight
