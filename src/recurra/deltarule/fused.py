"""The gated delta rule by one kernel, forward only, as a torch operator, and the inputs that it takes."""

import math

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.deltarule.modes import recurrent
from recurra.kernels.backends import NUMBA_IS_MISSING
from recurra.kernels.operator import Operator, needs_gradient, transforms_are_active
from recurra.kernels.tensors import addresses


def why_not_fused(*tensors: Tensor) -> str:
    """Say why the kernel does not take q, k, v, a, b and the state, of one type; "" if it does."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if device.type != "cpu":
        return f"the kernel runs on the CPU, and the tensors are on {device}"
    if dtype != torch.float32:
        return f"the kernel computes in float32, not in {str(dtype).removeprefix('torch.')}"
    if transforms_are_active() or needs_gradient(*tensors):
        return "the kernel has no derivatives"
    return NUMBA_IS_MISSING


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


def _run(results: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    y, last = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    from recurra.deltarule.numba_kernels import delta_rule_kernel

    batch, length, heads, d_qk = q.shape
    inputs = [x.resolve_neg().contiguous() for x in (q, k, v, a, b, state)]
    delta_rule_kernel()(
        *addresses(*inputs, last, y), batch, length, heads, d_qk, v.shape[3],
        jobs=batch * heads, work=length * state.numel(),
    )  # fmt: skip


fused = Operator(
    "delta_rule_fused(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state) -> (Tensor, Tensor)",
    check=_check,
    allocate=lambda q, k, v, a, b, state: (v.new_empty(v.shape), state.new_empty(state.shape)),
    run=_run,
    flops=lambda q, k, v, *_: 6 * math.prod(q) * v[-1],  # a value read, one written, and the output
)
"""Computes (y, h_L) like the functions of `modes`, from at least one step of float32."""
fused.record = recurrent
