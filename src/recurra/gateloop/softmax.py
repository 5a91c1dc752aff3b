"""Softmax attention with data-controlled relative positions (GateLoop section 3.4)."""

import functools

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from recurra.checks import kind_of, require_tensor, sentence
from recurra.gateloop.chunk import scalar_scores, vector_scores
from recurra.gateloop.inputs import check_inputs, check_numbers
from recurra.kernels.tensors import HALF

_BLOCK = 64  # queries computed together, a power of 2


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
    given = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    gated = functools.reduce(torch.promote_types, (q.dtype, k.dtype, a.dtype, torch.float32))
    q, k, a = (x.to(gated).transpose(1, 2) for x in (q, k, a))
    weighed = torch.promote_types(v.dtype, _real(q).dtype)
    v = v.to(weighed).transpose(1, 2)
    if 0 in (q.numel(), v.numel()):
        y = v[:, :, k.shape[2] - q.shape[2] :] + _real(q.sum() + (k * a).sum())  # for their gradients
        return y.transpose(1, 2).to(given if given in HALF else weighed)
    with torch.autocast(q.device.type, enabled=False):
        y = torch.cat(_attend(q, k, v, a, k.shape[2] if window is None else window), 2).transpose(1, 2)
    return y.to(given) if given in HALF else y


def _attend(q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int) -> list[Shaped[Tensor, "B H C d_v"]]:
    """Compute the outputs of the queries block by block; all tensors are (B, H, steps, d).

    Steps are split into blocks and joined again, not sliced: the gradient of a slice is as long as the sequence.
    """
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
    whole, rest = divmod(n_steps, _BLOCK)
    return [*[_BLOCK] * whole, *([rest] if rest else [])]


def _steps_before(i: int, blocks: tuple[Tensor, ...], n_steps: int) -> Shaped[Tensor, "B H S d"]:
    """Take the last `n_steps` steps before block i, or all if there are fewer; only the outer blocks can be partial."""
    n_blocks = -(-n_steps // _BLOCK)
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
    own, up_to, _ = (scalar_scores if own_a.shape[-1] == 1 else vector_scores)(padded_q, padded_k, padded_a)
    own = _real(own[..., :n_own, :n_own])
    if not older_k.shape[2]:
        return own
    after = torch.cat([older_a[:, :, 1:], torch.ones_like(older_a[:, :, :1])], 2).flip(2).cumprod(2).flip(2)
    older = _real_product(q * up_to[..., :n_own, :], older_k * after)
    return torch.cat([older, own], -1)


def _real_product(x: Shaped[Tensor, "B H C d"], y: Shaped[Tensor, "B H S d"]) -> Float[Tensor, "B H C S"]:
    """Compute Re(x y^T) without the imaginary part."""
    if x.is_complex():
        x, y = torch.cat([x.real, -x.imag], -1), torch.cat([y.real, y.imag], -1)
    return x @ y.transpose(-1, -2)


def _real(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, window: int | None) -> None:
    for name, tensor in (("q", q), ("k", k)):
        require_tensor(name, tensor)
        check_numbers(name, tensor, q, "(B, L, H, d)")
    if q.shape[1] > k.shape[1]:
        raise ValueError(sentence("q", kind_of(q), f"at most {k.shape[1]} steps, those of k"))
    check_inputs(q, k, v, a, k.shape[1])
    if window is not None and window < 1:
        raise ValueError(sentence("window", window, "at least 1, the step itself, or None for all steps"))
