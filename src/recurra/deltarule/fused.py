"""The gated delta rule by one kernel, forward only, as a torch operator, and the inputs that it takes."""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.deltarule.modes import recurrent
from recurra.kernels.backends import NUMBA_IS_MISSING
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.operators import register_derivatives, transforms_are_active
from recurra.kernels.tensors import require_one_device

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define("delta_rule_fused(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state) -> (Tensor, Tensor)")


def why_not_fused(*tensors: Tensor) -> str:
    """Say why the kernel does not take q, k, v, a, b and the state, of one type; "" if it does."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if device.type != "cpu":
        return f"the kernel runs on the CPU, and the tensors are on {device}"
    if dtype != torch.float32:
        return f"the kernel computes in float32, not in {str(dtype).removeprefix('torch.')}"
    if transforms_are_active() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return "the kernel has no derivatives"
    return NUMBA_IS_MISSING


def fused(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (y, h_L) like the functions of `modes`, from at least one step of float32.

    Raises:
        ValueError: from the operator, if a tensor does not fit.
    """
    hand_over_formulas()
    return torch.ops.recurra.delta_rule_fused(q, k, v, a, b, h)


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    """Refuse what the kernel cannot take: float32 on the CPU, q (B, L, H, d_qk), a and b (B, L, H, 1)."""
    if q.dim() != 4 or q.dtype != torch.float32:
        raise ValueError(sentence("q", kind_of(q), "float32 (B, L, H, d_qk)"))
    steps, d_v = q.shape[:3], v.shape[-1] if v.dim() else 0
    require_layout("k", k, q.shape, q.dtype, q.device)
    require_layout("v", v, (*steps, d_v), q.dtype, q.device)
    require_layout("a", a, (*steps, 1), q.dtype, q.device)
    require_layout("b", b, (*steps, 1), q.dtype, q.device)
    require_layout("state", state, (steps[0], steps[2], q.shape[3], d_v), q.dtype, q.device)


def _forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    _check(q, k, v, a, b, state)
    y, last = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (v, state))
    if 0 in (q.numel(), v.numel()):
        return y.zero_(), last.copy_(state)
    from recurra.deltarule.numba_kernels import delta_rule_kernel

    batch, length, heads, d_qk = q.shape
    inputs = [x.resolve_neg().contiguous() for x in (q, k, v, a, b, state)]
    delta_rule_kernel()(
        *(x.data_ptr() for x in (*inputs, last, y)), batch, length, heads, d_qk, v.shape[3],
        jobs=batch * heads, work=length * state.numel(),
    )  # fmt: skip
    return y, last


_library.impl("delta_rule_fused", _forward, "CPU")


@torch.library.register_fake("recurra::delta_rule_fused")
def _fake(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    require_one_device(q=q, k=k, v=v, a=a, b=b, state=state)
    return v.new_empty(v.shape), state.new_empty(state.shape)


register_derivatives(_library, "delta_rule_fused", recurrent)


@flop_formula(torch.ops.recurra.delta_rule_fused)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return 6 * torch.Size(q_shape).numel() * v_shape[-1]  # a value read, one written, and the output
