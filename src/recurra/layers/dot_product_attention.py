"""torch's attention, in a form that the transforms of torch.func accept."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.kernels.operator import transforms_are_active

_MOST_ROWS = 65_535
"""The most sequences in a call: some of torch's kernels on a GPU number them in a dimension that has no more."""
_SHORT = 1024
"""The most keys for which the scores of all queries are formed: more would take too much memory."""


def dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, which takes the same options.

    Under torch.func and forward derivatives it computes in plain operators: torch's fast kernels have no rules there.
    A mask that needs a gradient gets one for an empty batch too, which torch does not give it.
    """
    if queries.shape[0] > _MOST_ROWS:
        return _by_rows(queries, keys, values, options)
    if transforms_are_active():
        with sdpa_kernel(SDPBackend.MATH):
            y = functional.scaled_dot_product_attention(queries, keys, values, **options)
    else:
        y = functional.scaled_dot_product_attention(queries, keys, values, **options)
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad and not queries.numel():
        y = y + mask.sum()
    return y


def _by_rows(queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
    """Compute as many sequences at once as a call may have."""
    mask, found = options.get("attn_mask"), []
    for start in range(0, queries.shape[0], _MOST_ROWS):
        rows = slice(start, start + _MOST_ROWS)
        if mask is not None and mask.ndim == queries.ndim and mask.shape[0] > 1:
            options = {**options, "attn_mask": mask[rows]}
        found.append(dot_product_attention(queries[rows], keys[rows], values[rows], **options))
    return torch.cat(found)


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute the same for steps that see themselves, (B, H, L, d_head), and what a mask (L, K) shows them.

    Short bfloat16 sequences on a CPU that need a gradient go through plain products, with scores in bfloat16 and a
    softmax in float32 inside: torch's fast kernel took two to four times as long there (docs/lab-log.md).

    Args:
        queries, keys, values: L, K and K steps.
        visible: True where a query sees a key, itself at least; None for all steps up to its own, where L = K.
        dropout_p: probability of dropping an attention weight.
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
