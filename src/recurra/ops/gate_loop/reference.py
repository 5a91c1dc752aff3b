"""GateLoop's recurrence in plain torch, in ways with one result: steps, a scan, chunks and attention."""

import functools

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from recurra.checks import kind_of, require_tensor, sentence
from recurra.ops._causality import causal_in_nonfinite, keep_apart, nonfinite_steps
from recurra.ops._operator import HALF, OneNode, is_any_length, is_recorded
from recurra.ops.scan.operator import linear_scan


def check_numbers(name: str, tensor: Tensor, like: Tensor, dimensions: str) -> None:
    """Refuse anything but floating-point or complex numbers in four dimensions on the device of `like`."""
    require_tensor(name, tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(sentence(name, kind_of(tensor), "floating-point or complex numbers"))
    if tensor.dim() != 4:
        raise ValueError(sentence(name, kind_of(tensor), dimensions))
    if tensor.device != like.device:
        raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {like.device}, as q"))


def check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Refuse a tensor of none of these shapes. Raises ValueError."""
    if tensor.shape not in shapes:
        raise ValueError(sentence(name, kind_of(tensor), " or ".join(map(str, shapes))))


def check_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, n_steps: int | None = None, grouped: bool = False) -> None:
    """Refuse q, k, v and a that do not belong together.

    Args:
        q: (B, L, H, d_qk).
        k, v, a: (B, n_steps, H, ...), of d_qk, d_v, and 1 or d_qk channels.
        n_steps: L if None.
        grouped: v and a may have a multiple of H heads.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a)):
        check_numbers(name, tensor, q, "(B, L, H, d)")
    batch, length, heads, d_qk = q.shape
    if n_steps is not None:
        length = n_steps
    check_shape("k", k, (batch, length, heads, d_qk))
    heads = v.shape[2] if grouped and heads and v.shape[2] % heads == 0 else heads
    check_shape("v", v, (batch, length, heads, v.shape[3]))
    check_shape("a", a, (batch, length, heads, 1), (batch, length, heads, d_qk))


def into_blocks(x: Shaped[Tensor, "B L H d"], size: int, padding: float) -> Shaped[Tensor, "B H blocks n d"]:
    """Cut into blocks of `size` steps; the last is filled up with `padding`."""
    missing = -x.shape[1] % size
    if is_any_length(x.shape[1]) or missing:
        filler = torch.full((x.shape[0], missing, *x.shape[2:]), padding, dtype=x.dtype, device=x.device)
        x = torch.cat([x, filler], 1)
    return x.transpose(1, 2).unflatten(2, (-1, size))


# Symbols are those of GateLoop (7)-(9): h_n = h_{n-1} a_n + k_n^T v_n, y_n = q_n h_n; a_n acts on the key side.
# Shapes: q, k (B, L, H, d_qk); v (B, L, H, d_v); a (B, L, H, 1) or (B, L, H, d_qk); h (B, H, d_qk, d_v). All modes
# take tensors of one compute type (see `operator.py`) and a state.


_BLOCK = 32  # steps in a block of the attention mode


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute step by step in plain torch: O(L) time, the memory of one state (GateLoop (7)-(8))."""
    given = (q, k, v, a, h)
    if q.shape[1] == 1 and is_recorded() and all(x.dtype == torch.float32 for x in given):
        y, h = _one_step(*given)
        return y, h
    return _recurrent(*given)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for n in range(q.shape[1]):
        q_n, k_n, v_n, a_n = (x.select(1, n) for x in (q, k, v, a))
        h = a_n.unsqueeze(-1) * h + k_n.unsqueeze(-1) * v_n.unsqueeze(-2)
        outputs.append((q_n.unsqueeze(-1) * h).sum(-2))
    return torch.stack(outputs, 1), h


_one_step = OneNode(
    "gate_loop_step(Tensor q, Tensor k, Tensor v, Tensor a, Tensor h) -> (Tensor, Tensor)",
    _recurrent,
    lambda q, k, v, a, h: (v.new_empty(v.shape), h.new_empty(h.shape)),
    n_inputs=5,
)


def scan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute a linear scan with the leaves (a_n, k_n^T v_n), GateLoop (12)-(13): O(L) work, all L states in memory."""
    states = linear_scan(a[..., None], k[..., :, None] * v[..., None, :], h, backend=backend)
    # a copy, because a view as the next state would keep all states in memory
    return (q[..., :, None] * states).sum(-2), states[:, -1].clone()


@causal_in_nonfinite(4)
def attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute surrogate attention, GateLoop (14)-(21): Y = ((Q * Pi)(K * Pi^-1)^T . M) V in O(L^2) time and memory.

    The paper warns that Pi underflows. So Pi^-1 is never formed: the decay between two steps, prod_{j=m+1..n} a_j, is
    the product of the transitions after m in m's block, of the whole blocks in between, and of those up to n in n's
    block. Products, unlike differences of log-magnitudes, are exact for transitions of 0, in value and gradient.
    """
    length = q.shape[1]
    block, dtype = min(_BLOCK, length), a.dtype
    q, k, v = (into_blocks(x.to(dtype), block, 0.0) for x in (q, k, v))
    a = into_blocks(a, block, 1.0)
    up_to = a.cumprod(-2)  # within a block: from its start to n, n included
    after = torch.cat([a[..., 1:, :], torch.ones_like(a[..., :1, :])], -2).flip(-2).cumprod(-2).flip(-2)
    whole = up_to[..., -1, :]  # (B, H, blocks, d_a)
    between = segment_products(whole)
    none = torch.zeros_like(between[..., :1, :, :])
    between = torch.cat([none, between[..., :-1, :, :]], -3)  # [I, J]: the blocks after J and before I

    decay = segment_products(a)  # (B, H, blocks, n, m, d_a)
    near = (q[..., :, None, :] * decay * k[..., None, :, :]).sum(-1) @ v
    far_q, far_k = q * up_to, k * after
    scores = torch.einsum("bhIJid,bhJjd->bhIiJj", far_q[:, :, :, None] * between[..., None, :], far_k)
    far = torch.einsum("bhIiJj,bhJjv->bhIiv", scores, v)

    before = torch.cat([torch.ones_like(whole[..., :1, :]), whole.cumprod(-2)], -2)  # all blocks before I
    from_state = (far_q * before[..., :-1, None, :]) @ h[:, :, None]
    y = (near + far + from_state).flatten(2, 3)[:, :, :length].transpose(1, 2)

    to_the_end = torch.cat([between[..., -1, :-1, :] * whole[..., -1:, :], torch.ones_like(whole[..., :1, :])], -2)
    weighted_k = far_k * to_the_end[..., None, :]
    last = before[..., -1, :, None] * h + torch.einsum("bhJjd,bhJjv->bhdv", weighted_k, v)
    return y, last


def segment_products(a: Shaped[Tensor, "*batch n d"]) -> Shaped[Tensor, "*batch n n d"]:
    """Return P[i, j] = prod_{l=j+1..i} a_l for i >= j and 0 for i < j (GateLoop (20)), by direct multiplication."""
    n = a.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=a.device).tril(-1)[..., None]
    factors = torch.where(later, a[..., :, None, :], torch.ones((), dtype=a.dtype, device=a.device))
    on_or_below = torch.ones(n, n, dtype=torch.bool, device=a.device).tril()[..., None]
    return factors.cumprod(-3) * on_or_below


# Chunks: surrogate attention inside a chunk, the recurrence between chunks. The decay from step j to step i of a chunk
# is prod_{l=j+1..i} a_l. A quotient of cumulative products would underflow, so a chunk is halved again and again.
# Between the left and the right half of a block, the decay is the product of the transitions after j in the left half
# and those up to i in the right half,
#
#     S[right, left] = (Q up)_right ((K after)_left)^T,
#
# so one matrix product gives all scores between the halves, for a transition per channel too. Every factor is a
# product of the transitions themselves: exact for transitions of 0, and only the result can underflow. up, after and
# those of the next level follow from one multiplication each. Symbols and shapes are those of `modes`.


_CHUNK = 64
"""Steps per chunk, a power of 2."""


@causal_in_nonfinite(4)
def chunk(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Take O(L (chunk + d_qk d_v / chunk) d) work in matrix products and O(L (d + chunk + d_qk d_v / chunk)) memory."""
    length, dtype = q.shape[1], a.dtype
    size = _CHUNK if is_any_length(length) else min(_CHUNK, 1 << (length - 1).bit_length())
    q, k, v = (into_blocks(x.to(dtype), size, 0.0) for x in (q, k, v))
    a = into_blocks(a, size, 1.0)
    scores, up_to, after = scores_between(q, k, a)
    # What each chunk adds to the state; then a scan over chunks gives the state at the start of each.
    added = (k * after).transpose(-1, -2) @ v
    whole = up_to[..., -1, :, None]
    states = linear_scan(whole.transpose(1, 2), added.transpose(1, 2), h, backend=backend).transpose(1, 2)
    before = torch.cat([h[:, :, None], states[:, :, :-1]], 2)
    y = scores @ v + (q * up_to) @ before
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1].clone()


def scores_between(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the scores q_i k_j prod_{l=j+1..i} a_l between all steps of each chunk.

    Returns:
        (..., C, C) with row i and column j, zeros above the diagonal; the products of the transitions from the chunk's
        start up to each step and those after it to the chunk's end, both (..., C, d_a).
    """
    return (_scalar_scores if a.shape[-1] == 1 else _vector_scores)(q, k, a)


def _scalar_scores(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute them for one transition per head."""
    decay, up_to, after = _decays(a)
    return (q @ k.transpose(-1, -2)) * decay, up_to, after


def _decays(a: Shaped[Tensor, "*batch C 1"]) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the transitions between all steps of a chunk, up to and after each step, one transition per head."""
    up_to, after, decay = a, torch.ones_like(a), torch.ones_like(a)[..., None]
    while up_to.shape[-2] > decay.shape[-2]:
        halves = _Halves(up_to, after, decay.shape[-2])
        decay = halves.assemble(decay, halves.right_up @ halves.left_after.transpose(-1, -2))
        up_to, after = halves.joined()
    return decay[..., 0, :, :], up_to, after


def _vector_scores(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute them for a transition per key channel."""
    up_to, after, scores = a, torch.ones_like(a), (q * k).sum(-1)[..., None, None]
    while up_to.shape[-2] > scores.shape[-2]:
        size = scores.shape[-2]
        halves = _Halves(up_to, after, size)
        right_q, left_k = _halved(q, size)[..., 1, :, :], _halved(k, size)[..., 0, :, :]
        between = (right_q * halves.right_up) @ (left_k * halves.left_after).transpose(-1, -2)
        scores = halves.assemble(scores, between)
        up_to, after = halves.joined()
    return scores[..., 0, :, :], up_to, after


class _Halves:
    """Pairs of neighbouring blocks of `size` steps, to be joined into blocks of twice the size."""

    def __init__(self, up_to: Tensor, after: Tensor, size: int) -> None:
        up, rest = _halved(up_to, size), _halved(after, size)
        self.left_up, self.right_up = up[..., 0, :, :], up[..., 1, :, :]
        self.left_after, self.right_after = rest[..., 0, :, :], rest[..., 1, :, :]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Multiply the transitions from a block's start up to each step, and after each step to the block's end."""
        left, right = self.left_up[..., -1:, :], self.right_up[..., -1:, :]
        up_to = torch.stack([self.left_up, self.right_up * left], -3)
        after = torch.stack([self.left_after * right, self.right_after], -3)
        return up_to.flatten(-4, -2), after.flatten(-4, -2)

    @staticmethod
    def assemble(
        diagonal: Shaped[Tensor, "*batch blocks n n"], below: Shaped[Tensor, "*batch half n n"]
    ) -> Shaped[Tensor, "*batch half m m"]:
        """Build lower triangular matrices of twice the size from those of the halves and the scores between them."""
        pairs = diagonal.unflatten(-3, (-1, 2))
        upper = torch.cat([pairs[..., 0, :, :], torch.zeros_like(below)], -1)
        lower = torch.cat([below, pairs[..., 1, :, :]], -1)
        return torch.cat([upper, lower], -2)


def _halved(x: Shaped[Tensor, "*batch C d"], size: int) -> Shaped[Tensor, "*batch half 2 n d"]:
    return x.unflatten(-2, (-1, 2, size))


_SOFTMAX_BLOCK = 64  # queries computed together, a power of 2


def softmax_attention(
    q: Shaped[Tensor, "B L H d_qk"],
    k: Shaped[Tensor, "B K H d_qk"],
    v: Shaped[Tensor, "B K H d_v"],
    a: Shaped[Tensor, "B K H d_a"],
    *,
    window: int | None = None,
) -> Shaped[Tensor, "B L H d_v"]:
    """Compute Y = softmax(M_-inf(Re(Qbar Kbar^T) / sqrt(d_qk))) V with Qbar = Q * Pi and Kbar = K * Pi^-1.

    This is GateLoop (22)-(23). The score of steps n >= m is thus Re(sum_d q_nd k_md prod_{l=m+1..n} a_ld): the
    transitions say how much of a key is left, and at which phase. A transition of 0 sets the scores of all older steps
    to 0; it does not remove their weight. The paper does not mention scaling; 1 / sqrt(d_qk) is attention's.

    Neither Pi nor Pi^-1 is formed. Every factor is a product of transitions between two steps, exact for transitions of
    0, so only a result can underflow. Queries are computed in blocks of C = 64. Within a block the decays are those of
    mode "chunk"; older steps meet the block as (q_n prod of transitions from the block's start to n)
    (k_m prod of transitions from m to the block's start). If a block sees S keys, K or window + C of them, that is
    O(L S d) work for any d_a, and O(L (S + S d / C + d log C)) memory if gradients are recorded, O(C S + S d) if not;
    never O(L^2 d).

    Args:
        q: queries of the last L of the K steps, real or complex.
        k, v: keys and values of all steps, L <= K, real or complex.
        a: transitions of all steps, real or complex, d_a = 1 (one per head) or d_qk (one per key channel). The oldest
            step has nothing before it, so its transition does not matter.
        window: the number of steps that a step attends to, itself included; None for all.

    Returns:
        y, complex if v is. float16 and bfloat16 are computed in float32, under autocast too; a y of such q, k and v has
        their type.

    Raises:
        TypeError: an argument is not a tensor of floating-point or complex numbers.
        ValueError: shapes or devices do not fit, or the window is below 1.
    """
    _check(q, k, v, a, window)
    if is_any_length(k.shape[1]):
        return _any_steps(q, k, v, a, window)
    given = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    gated = functools.reduce(torch.promote_types, (q.dtype, k.dtype, a.dtype, torch.float32))
    of_queries, of_keys = nonfinite_steps(q), nonfinite_steps(k, v, a)
    if of_queries is not None or of_keys is not None:
        return _softmax_of_finite(q, k, v, a, window, of_queries, of_keys)
    given_inputs, before = (q, k, v, a), k.shape[1] - q.shape[1]
    q, k, a = (x.to(gated).transpose(1, 2) for x in (q, k, a))
    weighed = torch.promote_types(v.dtype, q.real.dtype)
    v = v.to(weighed).transpose(1, 2)
    if 0 in (q.numel(), v.numel()):
        y = v[:, :, before:] + (q.sum() + (k * a).sum()).real  # for their gradients
        return y.transpose(1, 2).to(given if given in HALF else weighed)
    with torch.autocast(q.device.type, enabled=False):
        y = torch.cat(_attend(q, k, v, a, k.shape[2] if window is None else window), 2).transpose(1, 2)

    def seen(bad: Tensor) -> list[Tensor]:
        by_bad = _within(functional.pad(bad, (before, 0)).flip(1), window).flip(1)
        return [x[:, :, None, None] for x in (bad, by_bad, by_bad, by_bad)]

    y = keep_apart(y, seen, *given_inputs)
    return y.to(given) if given in HALF else y


def _within(marks: Tensor, window: int | None) -> Tensor:
    """Mark the steps (B, K) with a mark within the `window` steps up to them."""
    n = marks.shape[1] if window is None else min(window, marks.shape[1])
    counts = functional.pad(marks.cumsum(1), (n, 0))
    return counts[:, n:] > counts[:, : marks.shape[1]]


def _softmax_of_finite(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int | None, of_queries: Tensor | None, of_keys: Tensor | None
) -> Tensor:
    """Attend without the steps that have infinities or NaN; NaN where they would have been seen."""
    q, k, v, a = (
        x if bad is None else x.masked_fill(bad[:, :, None, None], 0)
        for x, bad in ((q, of_queries), (k, of_keys), (v, of_keys), (a, of_keys))
    )
    seen = q.new_zeros(q.shape[:2], dtype=torch.bool) if of_queries is None else of_queries
    if of_keys is not None:
        seen = seen | _within(of_keys, window)[:, k.shape[1] - q.shape[1] :]
    return softmax_attention(q, k, v, a, window=window).masked_fill(seen[:, :, None, None], torch.nan)


def _softmax_result(q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int | None) -> Tensor:
    given = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    weighed = functools.reduce(torch.promote_types, (q.dtype, k.dtype, a.dtype, torch.float32)).to_real()
    dtype = given if given in HALF else torch.promote_types(v.dtype, weighed)
    return v.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)


_any_steps = OneNode(
    "gate_loop_softmax_attention(Tensor q, Tensor k, Tensor v, Tensor a, SymInt? window) -> Tensor",
    lambda q, k, v, a, window: softmax_attention(q, k, v, a, window=window),
    _softmax_result,
    n_inputs=4,
)


def _attend(q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int) -> list[Shaped[Tensor, "B H C d_v"]]:
    """Compute the outputs of the queries block by block; all tensors are (B, H, steps, d)."""
    own, older = _block_sizes(q.shape[2]), _block_sizes(k.shape[2] - q.shape[2])[::-1]
    k_blocks, v_blocks, a_blocks = (x.split(older + own, 2) for x in (k, v, a))
    outputs = []
    for i, own_q in enumerate(q.split(own, 2), len(older)):
        older_k, older_v, older_a = (_steps_before(i, x, window - 1) for x in (k_blocks, v_blocks, a_blocks))
        scores = _scores(own_q, older_k, k_blocks[i], older_a, a_blocks[i])
        steps = torch.arange(scores.shape[-1], device=q.device)
        age = steps[older_k.shape[2] :, None] - steps
        weights = (scores * q.shape[-1] ** -0.5).masked_fill((age < 0) | (age >= window), -torch.inf).softmax(-1)
        outputs.append(weights.to(v.dtype) @ torch.cat([older_v, v_blocks[i]], 2))
    return outputs


def _block_sizes(n_steps: int) -> list[int]:
    whole, rest = divmod(n_steps, _SOFTMAX_BLOCK)
    return [*[_SOFTMAX_BLOCK] * whole, *([rest] if rest else [])]


def _steps_before(i: int, blocks: tuple[Tensor, ...], n_steps: int) -> Shaped[Tensor, "B H S d"]:
    """Take the last `n_steps` steps before block i, or all if there are fewer; only the outer blocks can be partial."""
    n_blocks = -(-n_steps // _SOFTMAX_BLOCK)
    older = torch.cat([blocks[i][:, :, :0], *blocks[max(0, i - n_blocks) : i]], 2)
    return older[:, :, max(0, older.shape[2] - n_steps) :]


def _scores(
    q: Shaped[Tensor, "B H C d"],
    older_k: Shaped[Tensor, "B H S d"],
    own_k: Shaped[Tensor, "B H C d"],
    older_a: Shaped[Tensor, "B H S d_a"],
    own_a: Shaped[Tensor, "B H C d_a"],
) -> Float[Tensor, "B H C S+C"]:
    """Compute Re(q_n k_m prod_{m < l <= n} a_l) of a block's C steps with all S + C steps; 0 where m > n."""
    n_own = q.shape[2]
    missing = (1 << (n_own - 1).bit_length()) - n_own  # to a power of 2; no earlier step sees the padding
    padded_q, padded_k = (functional.pad(x, (0, 0, 0, missing)) for x in (q, own_k))
    padded_a = functional.pad(own_a, (0, 0, 0, missing), value=1.0)
    own, up_to, _ = scores_between(padded_q, padded_k, padded_a)
    own = own[..., :n_own, :n_own].real
    if not older_k.shape[2]:
        return own + own_a[..., :0].sum().real  # a zero: with one step, no score depends on a, whose gradient is 0
    after = torch.cat([older_a[:, :, 1:], torch.ones_like(older_a[:, :, :1])], 2).flip(2).cumprod(2).flip(2)
    older = _real_product(q * up_to[..., :n_own, :], older_k * after)
    return torch.cat([older, own], -1)


def _real_product(x: Shaped[Tensor, "B H C d"], y: Shaped[Tensor, "B H S d"]) -> Float[Tensor, "B H C S"]:
    """Compute Re(x y^T) without the imaginary part."""
    if x.is_complex():
        x, y = torch.cat([x.real, -x.imag], -1), torch.cat([y.real, y.imag], -1)
    return x @ y.transpose(-1, -2)


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int | None) -> None:
    for name, tensor in (("q", q), ("k", k)):
        require_tensor(name, tensor)
        check_numbers(name, tensor, q, "(B, L, H, d)")
    if q.shape[1] > k.shape[1]:
        raise ValueError(sentence("q", kind_of(q), f"at most {k.shape[1]} steps, those of k"))
    check_inputs(q, k, v, a, k.shape[1])
    if window is not None and window < 1:
        raise ValueError(sentence("window", window, "at least 1, the step itself, or None for all steps"))
