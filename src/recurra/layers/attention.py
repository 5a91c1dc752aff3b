"""Softmax attention and what it sees: torch's attention under transforms, and windows over segments and steps."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.checks import require, require_at_least, require_heads
from recurra.ops._operator import OneNode, is_any_length, transforms_are_active


def head_size(d_model: int, n_heads: int, d_head: int | None) -> int:
    """Return the channels of a head: `d_head`, or d_model / n_heads if that is None."""
    require_at_least(1, d_model=d_model, n_heads=n_heads, d_head=1 if d_head is None else d_head)
    fits = d_head is not None or d_model % n_heads == 0
    require(fits, "n_heads", n_heads, f"a divisor of d_model = {d_model}", "or set d_head")
    return d_head or d_model // n_heads


@dataclass(frozen=True)
class AttentionWindow:
    """The lengths of Transformer-XL's attention (arXiv 1901.02860, section 3.2).

    A stream splits into segments at multiples of `segment_length`, however it is cut into calls. A step sees the
    memory, which is the last `mem_len` steps before its segment, and its own segment up to itself. With `same_length`
    it sees only the last `mem_len` of these steps, including itself, so that every step sees the same number once the
    stream is long enough. Distances beyond `clamp_len` are encoded as `clamp_len`.
    """

    segment_length: int
    mem_len: int
    same_length: bool = False
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, segment_length=self.segment_length)
        require(self.mem_len >= 0, "mem_len", self.mem_len, "at least 0, which means no memory")
        enough = self.mem_len >= 1 or not self.same_length
        hint = "a step sees mem_len steps, including itself"
        require(enough, "mem_len", self.mem_len, "at least 1 with same_length", hint)
        positive = self.clamp_len is None or self.clamp_len >= 1
        require(positive, "clamp_len", self.clamp_len, "at least 1, or None for no limit")

    def pieces(self, n_steps: int, position: int) -> list[int]:
        """Split `n_steps` (at least 1) at the borders of segments; the first step is at `position` in its segment."""
        first = min(n_steps, self.segment_length - position)
        whole, rest = (n_steps - first) // self.segment_length, (n_steps - first) % self.segment_length
        return [first, *[self.segment_length] * whole, *([rest] if rest else [])]

    def masked(self, n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "n_queries n_keys"]:
        """Mark the keys that a query must not see; the queries are the last `n_queries` of the keys' steps."""
        return ~visible_steps(n_queries, n_keys, self.mem_len if self.same_length else None, device)


_MOST_ROWS = 65_535  # in a call: some of torch's kernels on a GPU number them in a dimension that has no more
_SHORT = 1024  # the most keys for which the scores of all queries are formed: more would take too much memory


def dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, which takes the same options.

    Under torch.func and forward derivatives it computes in plain operators: torch's fast kernels have no rules there.
    A mask that needs a gradient gets one for an empty batch too, which torch does not give it.
    """
    mask, found = options.get("attn_mask"), []
    if queries.shape[0] > _MOST_ROWS:
        for rows in (slice(start, start + _MOST_ROWS) for start in range(0, queries.shape[0], _MOST_ROWS)):
            if mask is not None and mask.ndim == queries.ndim and mask.shape[0] > 1:
                options = {**options, "attn_mask": mask[rows]}
            found.append(dot_product_attention(queries[rows], keys[rows], values[rows], **options))
        return torch.cat(found)
    with sdpa_kernel(SDPBackend.MATH) if transforms_are_active() else nullcontext():
        y = functional.scaled_dot_product_attention(queries, keys, values, **options)
    if mask is not None and mask.requires_grad and not queries.numel():
        y = y + mask.sum()
    return y


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute the same for steps that see themselves, (B, H, L, d_head), and what a mask (L, K) shows them.

    Short bfloat16 sequences on a CPU that need a gradient go through plain products, with scores in bfloat16 and a
    softmax in float32 inside: torch's fast kernel took two to four times as long there (docs/lab-log.md). `visible` is
    True where a query sees a key, itself at least, or None for all steps up to its own, where L = K.
    """
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (queries, keys, values))
    is_short = queries.dtype == torch.bfloat16 and keys.shape[2] <= _SHORT
    if not needs_gradient or not is_short or not queries.is_cpu or torch.compiler.is_compiling():
        options = {"is_causal": True} if visible is None else {"attn_mask": visible}
        return dot_product_attention(queries, keys, values, dropout_p=dropout_p, **options)
    if visible is None:
        visible = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=queries.device).tril()
    hidden = queries.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
    q, k, v = (x.flatten(0, 1) for x in (queries, keys, values))
    weights = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=queries.shape[-1] ** -0.5).softmax(-1)
    return (functional.dropout(weights, dropout_p) @ v).unflatten(0, queries.shape[:2])


class SelfAttention(nn.Module):
    """y_i = W_o sum_j softmax_j((x_i W_q)(x_j W_k)^T / sqrt(d_head)) x_j W_v + b_o, per head, with biases (CRT (1)).

    Between all steps, without positions or causality (Vaswani et al., arXiv 1706.03762, section 3.2). In training,
    `attention_dropout` drops attention weights, and `dropout` channels of y.
    """

    def __init__(self, d_model: int, *, n_heads: int, attention_dropout: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        require_heads(n_heads, d_model=d_model)
        self.n_heads = n_heads
        self.attention_dropout = attention_dropout
        self.queries_keys_values = nn.Linear(d_model, 3 * d_model)
        self.output_projection = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "N L d_model"]) -> Float[Tensor, "N L d_model"]:
        """Mix the steps of each sequence."""
        return self._mix(*self._heads(self.queries_keys_values(x), 3))

    def _heads(self, projected: Tensor, n_parts: int) -> tuple[Tensor, ...]:
        """Split (N, L, parts * d_model) into one (N, H, L, d_head) per part."""
        return projected.unflatten(-1, (n_parts, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Bool[Tensor, "..."] | None = None) -> Tensor:
        """Attend to what is `visible` (everything when None), and project."""
        dropout = self.attention_dropout if self.training else 0.0
        y = dot_product_attention(queries, keys, values, attn_mask=visible, dropout_p=dropout)
        return self.dropout(self.output_projection(y.transpose(1, 2).flatten(2)))


_Seen = TypeVar("_Seen", bound=tuple[Tensor, ...])


def cache_limit(window: int | None) -> int | None:
    """Return how many steps a layer with this window keeps at most: all but the step itself; None for no limit."""
    require(window is None or window >= 1, "window", window, "at least 1, the step itself, or None for all steps")
    return None if window is None else window - 1


def append_to_cache(state: _Seen, new: _Seen) -> _Seen:
    """Append the steps of a call, a NamedTuple of tensors (B, L, ...), to those that the state holds."""
    return type(new)(*(torch.cat(pair, 1) for pair in zip(state, new))) if state[0].shape[1] else new


def trim_cache(known: _Seen, window: int | None) -> _Seen:
    """Return what the next step sees, at most window - 1 steps. Copies: a view would keep all steps of a call alive."""
    n_steps = known[0].shape[1]
    kept = n_steps if window is None else torch.sym_min(n_steps, window - 1)
    return type(known)(*(x[:, n_steps - kept :].clone() for x in known))


def windows(n_queries: int, n_keys: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """Split the last `n_queries` of `n_keys` steps into pieces of at most `window`, for memory in proportion.

    Yields start and stop of a piece among the queries, and first and last (exclusive) of the keys that it sees.
    """
    before = n_keys - n_queries
    for start in range(0, n_queries, window):
        stop = min(start + window, n_queries)
        yield start, stop, max(0, before + start - window + 1), before + stop


def visible_steps(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "L K"]:
    """Mark the steps of a window that each of the last `n_queries` steps sees."""
    steps = torch.arange(n_keys, device=device)
    age = steps[n_keys - n_queries :, None] - steps
    return (age >= 0) & (age < (n_keys if window is None else window))


def windowed_attention(
    queries: Float[Tensor, "B H L d_key"],
    keys: Float[Tensor, "B H K d_key"],
    values: Float[Tensor, "B H K d_value"],
    window: int | None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L d_value"]:
    """Attend from the last L of K steps to the last `window` steps of each; None for all. Memory grows with L alone."""
    n_keys = keys.shape[2]
    window = max(n_keys, 1) if window is None else window
    if not dropout and is_any_length(n_keys):
        return _any_steps(queries, keys, values, window)
    return _in_windows(queries, keys, values, window, dropout)


def _in_windows(queries: Tensor, keys: Tensor, values: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    outputs = []
    for start, stop, first, last in windows(queries.shape[2], keys.shape[2], window):
        seen = (queries[:, :, start:stop], keys[:, :, first:last], values[:, :, first:last])
        outputs.append(_in_window(*seen, window=window, dropout=dropout))
    return torch.cat(outputs, 2) if outputs else _like_values(queries, keys, values)


def _like_values(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return queries.new_empty((*queries.shape[:-1], values.shape[-1]))


def _in_window(queries: Tensor, keys: Tensor, values: Tensor, *, window: int, dropout: float) -> Tensor:
    n_queries, n_keys = queries.shape[2], keys.shape[2]
    if n_queries == n_keys <= window:
        return causal_attention(queries, keys, values, dropout_p=dropout)
    visible = visible_steps(n_queries, n_keys, window, keys.device)
    return causal_attention(queries, keys, values, visible=visible, dropout_p=dropout)


_any_steps = OneNode(
    "windowed_attention(Tensor queries, Tensor keys, Tensor values, SymInt window) -> Tensor",
    _in_windows,
    _like_values,
    n_inputs=3,
)
