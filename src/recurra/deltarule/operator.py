"""The front door of the gated delta rule."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import require_choice, sentence
from recurra.deltarule.fused import fused, why_not_fused
from recurra.deltarule.inputs import check_inputs
from recurra.deltarule.modes import chunk, recurrent
from recurra.kernels.tensors import HALF

MODES = ("auto", "recurrent", "chunk", "fused")
_FEW = 4
"""The most steps that "auto" computes one by one without the kernel: measured on a CPU (docs/lab-log.md)."""

_MODES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"recurrent": recurrent, "chunk": chunk, "fused": fused}


def delta_rule(
    q: Float[Tensor, "B L H d_qk"],
    k: Float[Tensor, "B L H d_qk"],
    v: Float[Tensor, "B L H d_v"],
    a: Float[Tensor, "B L H *one"],
    b: Float[Tensor, "B L H *one"],
    state: Float[Tensor, "B H d_qk d_v"] | None = None,
    *,
    mode: str = "auto",
) -> tuple[Float[Tensor, "B L H d_v"], Float[Tensor, "B H d_qk d_v"]]:
    """Compute h_t = a_t (I - b_t k_t^T k_t) h_{t-1} + b_t k_t^T v_t, y_t = q_t h_t: the gated delta rule.

    Yang, Kautz and Hatamizadeh, arXiv 2412.06464; with a = 1 it is the delta rule of Yang et al., arXiv 2406.06484.
    Vectors are rows and the state is (d_qk, d_v), as in `recurra.gate_loop`; the papers write the
    transpose. With b = 0 nothing is written and the state decays; with b = 1 and a key of length 1, the value that the
    state held for that key is replaced by v. The transition has the eigenvalue a (1 - b |k|^2) along k and a across it:
    with |k| = 1 and b between 1 and 2 it is negative (Grazzi et al., arXiv 2411.12537).

    Args:
        q, k: queries and keys. The rule is stable for b |k|^2 of at most 2; keys are not normalised here.
        v: values.
        a: decays, (B, L, H) or (B, L, H, 1), in [0, 1]; larger ones are computed too.
        b: how much of the difference is learned, (B, L, H) or (B, L, H, 1), in [0, 2].
        state: h_0, zeros if None.
        mode: how to compute it; all modes give the same result.
            "recurrent": step by step in plain torch, in O(L) steps.
            "chunk": chunks of 64 steps by matrix products and a triangular solve, and the recurrence between them.
            "fused": step by step by one Numba kernel: float32 on the CPU, where no gradient is needed.
            "auto": "fused" if it applies; else "recurrent" for up to 4 steps, and "chunk" for more.

    Returns:
        y and h_L. float16 and bfloat16 are computed in float32, also under autocast; y then has the type of q, k and v,
        and the state is float32 or better. Both can be differentiated in all inputs any number of times.

    Raises:
        TypeError: an argument is not a tensor of real floating-point numbers.
        ValueError: shapes or devices do not fit, or the mode does not exist or is not for such inputs.
    """
    require_choice(MODES, mode=mode)
    check_inputs(q, k, v, a, b, state)
    given = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    compute = torch.float32
    for tensor in (q, k, v, a, b) if state is None else (q, k, v, a, b, state):
        compute = torch.promote_types(compute, tensor.dtype)
    q, k, v, a, b = (x.to(compute) for x in (q, k, v, a, b))
    a, b = (x if x.dim() == 4 else x.unsqueeze(-1) for x in (a, b))
    if state is None:
        state = v.new_zeros((q.shape[0], *q.shape[2:], v.shape[3]))
    state = state.to(compute)
    mode = _choose_mode(mode, q, k, v, a, b, state)
    if 0 in (q.numel(), v.numel()):
        y, last = (q * k * a * b).sum(-1, keepdim=True) * v, state
    else:
        # Autocast would run the matrix products in bfloat16.
        with torch.autocast(q.device.type, enabled=False):
            y, last = _MODES[mode](q, k, v, a, b, state)
    return (y.to(given) if given in HALF else y), last


def _choose_mode(mode: str, *tensors: Tensor) -> str:
    """Return `mode` itself, or the choice of "auto". Raises ValueError for "fused" if it does not apply."""
    if mode not in ("auto", "fused"):
        return mode
    obstacle = why_not_fused(*tensors)
    if not obstacle:
        return "fused"
    if mode == "fused":
        raise ValueError(sentence("mode", "'fused'", "'auto' or another mode", obstacle))
    return "recurrent" if tensors[0].shape[1] <= _FEW else "chunk"
