"""The cost of a segment according to the Compact Recurrent Transformer's paper (CRT Table 1).

The table counts one forward over a segment of n tokens for a model of L layers and d channels, without embedding and
softmax, and omits terms of order n d. The paper gives neither the width of the feed-forward networks nor its way of
counting, and the rows count differently. We read them as follows:

- Transformer, 20 n d^2 per layer: four projections, two products for the relative positions and a feed-forward
  network 2 d wide are 10 d^2 weights, with 2 FLOPs for a multiply-add. 6 n^2 d: scores of content, scores of
  position, values.
- Transformer-XL, 28 n d^2: keys, values and positions (four of the ten) for 2 n tokens instead of n; 12 n^2 d and
  6 n^2 likewise.
- CRT, 12 n d^2 per layer for 8 d^2 weights, and 12 n d^2 for the 12 d^2 weights of its two RNNs. At 2 FLOPs for each
  multiply-add these would be 16 and 24, so this row cannot be compared with the other two. `recurra.analysis.cost`
  counts all models the same way.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn


class PublishedCost(NamedTuple):
    """A row of Table 1, evaluated.

    flops: of one forward over a segment, as the paper counts them (see above).
    parameters: without embedding and softmax.
    """

    flops: int
    parameters: int


def transformer(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    """The Transformer with relative positions: FLOPs L (20 n d^2 + 6 n^2 d), parameters L (10 d^2 + 6 d)."""
    n, d = segment_length, d_model
    return PublishedCost(n_layer * (20 * n * d**2 + 6 * n**2 * d), n_layer * (10 * d**2 + 6 * d))


def transformer_xl(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    """Transformer-XL with a memory as long as a segment: FLOPs L (28 n d^2 + 12 n^2 d + 6 n^2); parameters as above."""
    n, d = segment_length, d_model
    flops = n_layer * (28 * n * d**2 + 12 * n**2 * d + 6 * n**2)
    return PublishedCost(flops, transformer(n_layer, n, d).parameters)


def crt_gru(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    """CRT-GRU: FLOPs n d^2 (12 L + 12) + 8 L n^2 d, parameters (12 + 8 L) d^2 + (6 + 4 L) d."""
    n, d = segment_length, d_model
    return PublishedCost(
        n * d**2 * (12 * n_layer + 12) + 8 * n_layer * n**2 * d,
        (12 + 8 * n_layer) * d**2 + (6 + 4 * n_layer) * d,
    )


FORMULAS: dict[str, Callable[[int, int, int], PublishedCost]] = {
    "Transformer": transformer,
    "Transformer-XL": transformer_xl,
    "CRT-GRU": crt_gru,
    # The table has no row for it. A step takes the same products; U_c has half as many free parameters.
    "CRT-NCGRU": crt_gru,
}
"""The formula for every kind of model that has one: of (layers, tokens of a segment, channels)."""


def model_kind(model: nn.Module) -> str:
    """Return the name under which the paper's tables would list a model, or one that says what it is."""
    return str(getattr(model, "kind", type(model).__name__))


def published_cost(model: nn.Module) -> PublishedCost | None:
    """Return Table 1's numbers for a model, with its own layers, segments and channels; None if no row fits it."""
    row, config = getattr(model, "published_row", None), getattr(model, "config", None)
    if row not in FORMULAS or config is None:
        return None
    return FORMULAS[row](config.n_layer, config.segment_length, config.d_model)
