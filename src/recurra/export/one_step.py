"""The recurrences of a graph for one token: at one step a scan is a product and a sum."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recurra.export import operators  # noqa: F401  registers recurra::complex_scan


def _linear_scan(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str = "auto") -> Tensor:
    return a * h0.unsqueeze(1) + b


def _complex_scan(
    a_re: Tensor, a_im: Tensor, b_re: Tensor, b_im: Tensor, h0_re: Tensor, h0_im: Tensor
) -> tuple[Tensor, Tensor]:
    re, im = h0_re.unsqueeze(1), h0_im.unsqueeze(1)
    return a_re * re - a_im * im + b_re, a_re * im + a_im * re + b_im


def _gate_loop_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    x0_re: Tensor,
    x0_im: Tensor | None,
    keep_states: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    if a_im is None or x0_im is None:
        re = a_re * x0_re.unsqueeze(1) + k * v
        return q * re, re, re.new_empty(0)
    re, im = x0_re.unsqueeze(1), x0_im.unsqueeze(1)
    re, im = a_re * re - a_im * im + k * v, a_re * im + a_im * re
    return q * re, re, im


AT_ONE_STEP: dict[Any, Callable[..., Any]] = {
    torch.ops.recurra.linear_scan.default: _linear_scan,
    torch.ops.recurra.complex_scan.default: _complex_scan,
    torch.ops.recurra.gate_loop_fused.default: _gate_loop_fused,
}
"""Decompositions for `ExportedProgram.run_decompositions`."""
