"""Parallel prefix scans over any associative operator: the textbook's algorithms, in plain torch.

A scan under an operator * turns x_1, x_2, ..., x_L into x_1, x_1 * x_2, ..., x_1 * ... * x_L. For the linear recurrence
h_t = a_t h_{t-1} + b_t the elements are pairs (a_t, b_t), and the operator is (a, b) * (a', b') = (a a', a' b + b')
(GateLoop (12)-(13), GateLoop App. B): see `linear_recurrence`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recurra.checks import require_choice, require_tensor, sentence

Combine: TypeAlias = Callable[[Any, Any], Any]
_Leaves: TypeAlias = list[Tensor]


def associative_scan(combine: Combine, leaves: Any, *, method: str = "blelloch", reverse: bool = False) -> Any:
    """Scan a sequence along dimension 1 with an associative operator (GateLoop (12)).

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
    _check(tensors, method)
    if tensors[0].shape[1] == 0:
        return leaves

    def flat_combine(earlier: _Leaves, later: _Leaves) -> _Leaves:
        pair = pytree.tree_unflatten(earlier, structure), pytree.tree_unflatten(later, structure)
        return pytree.tree_flatten(combine(*pair))[0]

    tensors = [x.flip(1) for x in tensors] if reverse else tensors
    scanned = _METHODS[method](flat_combine, tensors)
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


def _sequential(combine: Combine, x: _Leaves) -> _Leaves:
    prefix = [leaf[:, :1] for leaf in x]
    prefixes = [prefix]
    for t in range(1, x[0].shape[1]):
        prefix = combine(prefix, [leaf[:, t : t + 1] for leaf in x])
        prefixes.append(prefix)
    return _concatenate(*prefixes)


def _hillis_steele(combine: Combine, x: _Leaves) -> _Leaves:
    distance, length = 1, x[0].shape[1]
    while distance < length:
        combined = combine([leaf[:, :-distance] for leaf in x], [leaf[:, distance:] for leaf in x])
        x = _concatenate([leaf[:, :distance] for leaf in x], combined)
        distance *= 2
    return x


def _blelloch(combine: Combine, x: _Leaves) -> _Leaves:
    """Up-sweep: combine neighbours until one is left. Down-sweep: give each node everything before its subtree.

    The textbook gives the root the identity, a left child its parent's value, and a right child the parent's value
    combined with its left sibling's up-sweep. That exclusive scan, combined with the leaves, is the inclusive one. Here
    the operator needs no identity: only the nodes on the left edge have nothing before them, and they are skipped on
    the way down. An odd node at the end of a level moves up unchanged, as it would if padded with the identity.
    """
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


_METHODS: dict[str, Callable[[Combine, _Leaves], _Leaves]] = {
    "blelloch": _blelloch,
    "hillis_steele": _hillis_steele,
    "sequential": _sequential,
}


def _check(tensors: list[Any], method: str) -> None:
    require_choice(_METHODS, method=method)
    if not tensors:
        raise ValueError(sentence("leaves", "a pytree without tensors", "at least one (B, L, ...)"))
    for leaf in tensors:
        require_tensor("a leaf", leaf)
    shapes = [tuple(leaf.shape) for leaf in tensors]
    if any(len(shape) < 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(sentence("leaves", f"a pytree of shapes {shapes}", "(B, L, ...) for each, with one L"))
