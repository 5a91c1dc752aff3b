"""A language model's step for ExecuTorch, PyTorch's runtime for small devices.

At one step a recurrence is a product and a sum, so that the file needs ExecuTorch's portable operators alone. Needs the
package: `pip install recurra[executorch]`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from executorch.exir import to_edge
from torch import Tensor
from torch.export import default_decompositions

from recurra.export.planes import RealProgram
from recurra.export.programs import step_program, zero_state
from recurra.models import LanguageModelShell


def step_to_executorch(model: LanguageModelShell, *, batch: int = 1) -> bytes:
    """Return the content of a .pte file whose method `forward(tokens, *state)` returns `(logits, *state)`.

    tokens are (batch, 1); the state tensors are those of `recurra.export.state_tensors`, in this order and in float32,
    complex ones with a last dimension of 2. A stream starts from zeros.

    Args:
        model: a language model on the CPU, in float32.
        batch: number of streams, which is fixed.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    step = step_program(model, batch=batch)
    arguments = torch.zeros(batch, 1, dtype=torch.int64), *zero_state(step.state, batch)
    with torch.no_grad():
        program = torch.export.export(RealProgram(step.program).eval(), arguments, strict=False)
        program = program.run_decompositions(default_decompositions() | _AT_ONE_STEP)
        return bytes(to_edge(program).to_executorch().buffer)


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
    a_im: Tensor,
    x0_re: Tensor,
    x0_im: Tensor,
    keep_states: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    re, im = x0_re.unsqueeze(1), x0_im.unsqueeze(1)
    re, im = a_re * re - a_im * im + k * v, a_re * im + a_im * re
    return q * re, re, im


def _exp2(x: Tensor) -> Tensor:
    return torch.exp(x * math.log(2))


_AT_ONE_STEP: dict[Any, Callable[..., Any]] = {
    torch.ops.recurra.linear_scan.default: _linear_scan,
    torch.ops.recurra.complex_scan.default: _complex_scan,
    torch.ops.recurra.gate_loop_fused.default: _gate_loop_fused,
    torch.ops.aten.exp2.default: _exp2,  # which ExecuTorch does not have
}
