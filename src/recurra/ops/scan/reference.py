"""Scans in plain torch: the recurrence step by step, and the textbook's parallel prefix scans over any associative
operator.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from recurra.checks import choose, require_tensor, sentence
from recurra.ops._operator import OneNode, is_any_length


def linear_scan_reference(
    a: Shaped[Tensor, "B L *channels"],
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "B *channels"],
    reverse: bool,
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t step by step, as it is written."""
    h, states = h0, []
    for t in reversed(range(b.shape[1])) if reverse else range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, dim=1)


_Combine: TypeAlias = Callable[[Any, Any], Any]
_Leaves: TypeAlias = list[Tensor]


def associative_scan(combine: _Combine, leaves: Any, *, method: str = "blelloch", reverse: bool = False) -> Any:
    """Scan a sequence along dimension 1 with an associative operator: x_1, x_1 * x_2, ..., x_1 * ... * x_L.

    This is GateLoop (12). `linear_recurrence` is the operator of h_t = a_t h_{t-1} + b_t.

    Args:
        combine: `combine(earlier, later)` of two pytrees like `leaves`, for many positions at once: dimension 1 holds
            the elements that the algorithm combines in one step. It must be associative; it need not commute.
        leaves: a pytree (tensor, tuple, dict, ...) of tensors (B, L, ...), with one element of the sequence per step.
        method: "sequential" (notes, sequential), O(L) work and depth; "hillis_steele" (doubling), O(L log L) work and
            O(log L) depth; "blelloch" (over a binary tree: notes, up-sweep; notes, down-sweep), O(L) work and O(log L)
            depth.
        reverse: scan from the end: position t gets x_L * ... * x_t, so the operator sees later elements first.

    Returns:
        The inclusive scan, a pytree like `leaves`, differentiable if `combine` is.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: the leaves differ in length, or the method does not exist.

    The example of the notes (notes, running sum):

    >>> x = torch.tensor([[3, 1, 7, 0, 4, 1, 6, 3]])
    >>> associative_scan(torch.add, x)
    tensor([[ 3,  4, 11, 11, 15, 16, 22, 25]])
    """
    tensors, structure = pytree.tree_flatten(leaves)
    scan = choose("method", _METHODS, method)
    for leaf in tensors:
        require_tensor("a leaf", leaf)
    shapes = [tuple(leaf.shape) for leaf in tensors]
    if not shapes or any(len(shape) < 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(sentence("leaves", f"a pytree of shapes {shapes}", "(B, L, ...) for each, with one L"))
    if tensors[0].shape[1] == 0:
        return leaves

    def flat_combine(earlier: _Leaves, later: _Leaves) -> _Leaves:
        pair = pytree.tree_unflatten(earlier, structure), pytree.tree_unflatten(later, structure)
        return pytree.tree_flatten(combine(*pair))[0]

    tensors = [x.flip(1) for x in tensors] if reverse else tensors
    scanned = scan(flat_combine, tensors)
    scanned = [x.flip(1) for x in scanned] if reverse else scanned
    return pytree.tree_unflatten(scanned, structure)


def linear_recurrence(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(a, b) * (a', b') = (a a', a' b + b'): the operator of h_t = a_t h_{t-1} + b_t, elementwise.

    This is GateLoop (13), and associative (GateLoop App. B; notes, operator).
    """
    (a, b), (later_a, later_b) = earlier, later
    return a * later_a, later_a * b + later_b


def matrix_recurrence(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same for dense transitions (notes, operator): h_t = A_t h_{t-1} + b_t, A (B, L, N, N), b (B, L, N).

    Matrices do not commute: the later transition stands on the left.
    """
    (a, b), (later_a, later_b) = earlier, later
    return later_a @ a, (later_a @ b[..., None])[..., 0] + later_b


def _sequential(combine: _Combine, x: _Leaves) -> _Leaves:
    prefix = [leaf[:, :1] for leaf in x]
    prefixes = [prefix]
    for t in range(1, x[0].shape[1]):
        prefix = combine(prefix, [leaf[:, t : t + 1] for leaf in x])
        prefixes.append(prefix)
    return _concatenate(*prefixes)


def _hillis_steele(combine: _Combine, x: _Leaves) -> _Leaves:
    distance, length = 1, x[0].shape[1]
    while distance < length:
        combined = combine([leaf[:, :-distance] for leaf in x], [leaf[:, distance:] for leaf in x])
        x = _concatenate([leaf[:, :distance] for leaf in x], combined)
        distance *= 2
    return x


def _blelloch(combine: _Combine, x: _Leaves) -> _Leaves:
    """Up-sweep: combine neighbours until one is left. Down-sweep: give each node everything before its subtree."""
    levels = [x]  # levels[i][j]: what the j-th subtree of 2^i leaves combines to
    while levels[-1][0].shape[1] > 1:
        level = levels[-1]
        even = level[0].shape[1] // 2 * 2
        parents = combine([leaf[:, 0:even:2] for leaf in level], [leaf[:, 1:even:2] for leaf in level])
        levels.append(_concatenate(parents, [leaf[:, even:] for leaf in level]))
    before = [leaf[:, :0] for leaf in x]  # for the nodes 1, 2, ... of a level: everything before their subtrees
    for level in levels[-2::-1]:
        left_siblings = [leaf[:, 0::2] for leaf in level]
        n_right = level[0].shape[1] // 2
        first_right = [leaf[:, :1] for leaf in left_siblings]
        other_right = combine(
            [leaf[:, : n_right - 1] for leaf in before], [leaf[:, 1:n_right] for leaf in left_siblings]
        )
        before = _interleave(_concatenate(first_right, other_right), before)
    return _concatenate([leaf[:, :1] for leaf in x], combine(before, [leaf[:, 1:] for leaf in x]))


def _concatenate(*parts: _Leaves) -> _Leaves:
    return [torch.cat(leaves, 1) for leaves in zip(*parts)]


def _interleave(first: _Leaves, second: _Leaves) -> _Leaves:
    """Take first_0, second_0, first_1, second_1, ...; `second` is as long as `first` or one shorter."""
    woven = []
    for one, other in zip(first, second):
        pairs = torch.stack([one[:, : other.shape[1]], other], 2).flatten(1, 2)
        woven.append(torch.cat([pairs, one[:, other.shape[1] :]], 1))
    return woven


_METHODS = {"blelloch": _blelloch, "hillis_steele": _hillis_steele, "sequential": _sequential}


def matrix_scan(
    matrix: Float[Tensor, "N N"], b: Float[Tensor, "B L N"], h0: Float[Tensor, "B N"]
) -> Float[Tensor, "B L N"]:
    """Compute h_t = A h_{t-1} + b_t along dimension 1 (notes, linear RNN).

    The way up combines neighbouring steps into A b_1 + b_2 with the matrix A^2; the recurrence of half the length is
    solved in the same way; on the way down every other state follows from the one before it. That is Blelloch's scan
    for an A that is the same at every step: it squares one matrix per level, where `associative_scan` with
    `matrix_recurrence` would multiply one per step. It takes 2 B L N^2 + N^3 log2(L) multiply-adds (a loop over the
    steps: B L N^2), 2 log2(L) products in a row instead of L, and the memory of two to three times b.
    """
    if b.shape[1] == 0:
        return b
    if is_any_length(b.shape[1]):
        return _any_matrix_scan(matrix, b, h0)
    with torch.autocast(b.device.type, enabled=False):  # bfloat16 is too coarse for powers
        first = b[:, :1] + (h0 @ matrix.T)[:, None]
        return _from_zero(matrix, torch.cat([first, b[:, 1:]], 1))


_any_matrix_scan = OneNode(
    "matrix_scan(Tensor matrix, Tensor b, Tensor h0) -> Tensor",
    matrix_scan,
    lambda matrix, b, h0: b.new_empty(b.shape),
    n_inputs=3,
)


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


def running_maximum(x: Float[Tensor, "B L *rest"]) -> Float[Tensor, "B L *rest"]:
    """Return the largest of the numbers up to each step; a single step is returned as it is."""
    is_one_step = not isinstance(x.shape[1], torch.SymInt) and x.shape[1] == 1
    return x if is_one_step else x.cummax(1).values


def stabilisers(
    sums: Float[Tensor, "#B L *rest"], log_i: Float[Tensor, "B L *rest"], m: Float[Tensor, "B *rest"]
) -> Float[Tensor, "B L *rest"]:
    """m_t = max(log f_t + m_{t-1}, log i_t) for all steps (Beck et al. (15)), by running sums of log f and maxima.

    Differences of running sums lose digits over many steps. That is harmless: numbers near these stabilise as well, if
    the whole recurrence uses the same ones.
    """
    return sums + torch.maximum(running_maximum(log_i - sums), m[:, None])
