"""Reformer: attention among steps that fall into the same bucket of a hash (Kitaev et al. 2020, arXiv 2001.04451)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.checks import require, require_at_least, require_heads, require_probability, require_whole_number
from recurra.layers.attention import append_to_cache, cache_limit, dot_product_attention, trim_cache, windows
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer
from recurra.ops._operator import OneNode, is_any_length

_SELF = -1e5  # what a step's score with itself loses, as in the published code; half the smallest number in float16


class ReformerState(NamedTuple):
    """The last p steps, p at most window - 1.

    queries: the queries, which are also the keys before they are normalised.
    values: the values.
    buckets: the number of each step's bucket in every round. A step keeps its bucket wherever a stream is cut.
    """

    queries: Float[Tensor, "B p H d_head"]
    values: Float[Tensor, "B p H d_head"]
    buckets: Float[Tensor, "B p H n_rounds"]


@register_mixer("reformer")
class Reformer(Mixer):
    """y_n = W_o sum_m softmax_m(q_n . q_m / |q_m|) v_m, m over the steps that share a bucket with n (section 2).

    Queries and keys are one projection, and keys have length 1. In each round a step falls into the bucket
    argmax([R q; -R q]), where R are random rotations, drawn once for every head and saved with the weights (the
    published training redraws them in every step). A step sees itself only if no other step shares a bucket with it.

    Rounds are combined as published (appendix A): one softmax over the steps that share a bucket with n in any
    round. The set of steps differs: the published layer sorts a whole sequence by buckets and attends within chunks,
    so later steps affect which earlier steps meet. Here, n attends to every step of its buckets within the last
    `window` steps. Sorting approximates this. The time is proportional to L * window.

    Args:
        n_heads: heads; they divide d_model.
        window: number of steps that a step attends to, itself included.
        n_buckets: buckets of a round, an even number.
        n_rounds: rounds of hashing.
        dropout: probability of dropping an attention weight.
    """

    rotations: Tensor

    masks_products = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        window: int = 128,
        n_buckets: int = 8,
        n_rounds: int = 4,
        dropout: float = 0.0,
    ) -> None:
        require_heads(n_heads, d_model=d_model)
        require_at_least(1, n_rounds=n_rounds)
        require_whole_number(1, window=window)
        require_probability(dropout=dropout)
        is_even = n_buckets >= 2 and n_buckets % 2 == 0
        require(is_even, "n_buckets", n_buckets, "an even number from 2", "every rotation has two signs")
        d_head, p = d_model // n_heads, Dim("p", cache_limit(window))
        past, buckets = StateSpec((p, n_heads, d_head)), StateSpec((p, n_heads, n_rounds))
        super().__init__(d_model, ReformerState, queries=past, values=past, buckets=buckets)
        self.n_heads, self.window, self.dropout = n_heads, window, dropout
        self.queries = nn.Linear(d_model, d_model, bias=False)
        self.values = nn.Linear(d_model, d_model, bias=False)
        self.register_buffer("rotations", torch.randn(n_heads, d_head, n_rounds, n_buckets // 2))
        self.output_projection = nn.Linear(d_model, d_model, bias=False)

    def mix(self, x: Tensor, state: ReformerState, mask: None) -> tuple[Tensor, ReformerState]:
        projected = self.queries(x), self.values(x)
        queries, values = (at_least_float32(part).unflatten(-1, (self.n_heads, -1)) for part in projected)
        known = append_to_cache(state, ReformerState(queries, values, self._buckets(queries)))
        dtype, dropout = projected[0].dtype, self.dropout if self.training else 0.0
        # as in the authors' code, whose epsilon is added to the mean square: a row of zeros has bounded gradients
        keys = known.queries * torch.rsqrt(known.queries.square().sum(-1, keepdim=True) + 1e-6 * queries.shape[-1])
        queries, keys, values = (part.to(dtype).transpose(1, 2) for part in (queries, keys, known.values))
        if not dropout and is_any_length(keys.shape[2]):
            y = _any_steps(queries, keys, values, known.buckets, self.window)
        else:
            y = _in_windows(queries, keys, values, known.buckets, self.window, dropout)
        return self.output_projection(y.transpose(1, 2).flatten(2)), trim_cache(known, self.window)

    def why_not_exportable(self) -> str:
        return "reformer keeps the last steps themselves, and their number grows up to its window"

    @torch.no_grad()
    def _buckets(self, queries: Float[Tensor, "B L H d_head"]) -> Float[Tensor, "B L H n_rounds"]:
        """argmax([R q; -R q]) in every round."""
        with torch.autocast(queries.device.type, enabled=False):  # the same buckets, whatever computes the rest
            rotated = torch.einsum("blhd,hdrc->blhrc", queries, at_least_float32(self.rotations).to(queries.dtype))
        return torch.cat([rotated, -rotated], -1).argmax(-1).to(queries.dtype)


def _in_windows(
    queries: Tensor, keys: Tensor, values: Tensor, buckets: Tensor, window: int, dropout: float = 0.0
) -> Tensor:
    """Attend from the last steps of those that have keys: (B, H, L, d_head)."""
    (n_queries, n_keys), dtype = (queries.shape[2], keys.shape[2]), queries.dtype
    outputs, loss = [], max(_SELF, torch.finfo(dtype).min / 2)
    for start, stop, first, last in windows(n_queries, n_keys, window):
        here, seen = buckets[:, n_keys - n_queries + start : last], buckets[:, first:last]
        bias = torch.where(_meet(here, seen, window), 0.0, -torch.inf) + loss * _same(here.shape[1], seen)
        outputs.append(
            dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, first:last],
                values[:, :, first:last],
                attn_mask=bias.to(dtype),
                dropout_p=dropout,
                scale=1.0,
            )
        )
    return torch.cat(outputs, 2)


_any_steps = OneNode(
    "reformer_attention(Tensor queries, Tensor keys, Tensor values, Tensor buckets, int window) -> Tensor",
    _in_windows,
    lambda queries, *_: queries.new_empty(queries.shape),
    n_inputs=4,
)


def _meet(here: Float[Tensor, "B q H r"], seen: Float[Tensor, "B k H r"], window: int) -> Bool[Tensor, "B H q k"]:
    """Whether the last q of k steps share a bucket with each step that is in their window, in any round."""
    age = torch.arange(seen.shape[1], device=seen.device)
    age = age[seen.shape[1] - here.shape[1] :, None] - age
    shared = torch.zeros((), dtype=torch.bool, device=seen.device)
    for one, other in zip(here.unbind(-1), seen.unbind(-1)):
        shared = shared | (one.transpose(1, 2)[..., None] == other.transpose(1, 2)[:, :, None])
    return shared & (age >= 0) & (age < window)


def _same(n_queries: int, seen: Float[Tensor, "B k H r"]) -> Float[Tensor, "q k"]:
    """1 where the last q of k steps meet themselves."""
    return torch.eye(seen.shape[1], dtype=seen.dtype, device=seen.device)[seen.shape[1] - n_queries :]
