"""The linear recurrence with one dense matrix, h_t = A h_{t-1} + b_t, on a tree, with A's powers made once."""

import torch
from jaxtyping import Float
from torch import Tensor


def matrix_scan(
    matrix: Float[Tensor, "N N"], b: Float[Tensor, "B L N"], h0: Float[Tensor, "B N"]
) -> Float[Tensor, "B L N"]:
    """Compute h_t = A h_{t-1} + b_t along dimension 1 (notes, linear RNN).

    The way up combines neighbouring steps into A b_1 + b_2 with the matrix A^2; the recurrence of half the length is
    solved in the same way; on the way down every other state follows from the one before it. That is Blelloch's scan
    for an A that is the same at every step: it squares one matrix per level, where `recurra.scan.associative_scan` with
    `matrix_recurrence` would multiply one per step.

    Args:
        matrix: A.
        b: the inputs, in the same type.
        h0: the state before the first step.

    Returns:
        h, (B, L, N), for any L. It takes 2 B L N^2 + N^3 log2(L) multiply-adds (a loop over the steps: B L N^2),
        2 log2(L) products in a row instead of L, and the memory of two to three times b.
    """
    if b.shape[1] == 0:
        return b
    with torch.autocast(b.device.type, enabled=False):  # bfloat16 is too coarse for powers
        first = b[:, :1] + (h0 @ matrix.T)[:, None]
        return _from_zero(matrix, torch.cat([first, b[:, 1:]], 1))


def _from_zero(matrix: Tensor, b: Tensor) -> Tensor:
    """Run the recurrence from zero, over at least one step."""
    if b.shape[1] == 1:
        return b
    even, odd = b[:, 0::2], b[:, 1::2]
    n_odd = odd.shape[1]
    h_odd = _from_zero(matrix @ matrix, even[:, :n_odd] @ matrix.T + odd)
    h_even = torch.cat([even[:, :1], h_odd[:, : even.shape[1] - 1] @ matrix.T + even[:, 1:]], 1)
    pairs = torch.stack([h_even[:, :n_odd], h_odd], 2).flatten(1, 2)
    return torch.cat([pairs, h_even[:, n_odd:]], 1)
