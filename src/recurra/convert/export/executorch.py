"""A language model's step for ExecuTorch, PyTorch's runtime for small devices.

At one step a recurrence is a product and a sum, so that the file needs ExecuTorch's portable operators alone. Needs the
package: `pip install "recurra[executorch]"`.
"""

import math

import torch
from executorch.exir import to_edge
from torch import Tensor
from torch.export import default_decompositions

from recurra.convert.export._planes import RealProgram
from recurra.convert.export.programs import AT_ONE_STEP, step_program, zero_state
from recurra.models.shell import LanguageModelShell


def step_to_executorch(model: LanguageModelShell, *, batch: int = 1) -> bytes:
    """Return the content of a .pte file whose method `forward(tokens, *state)` returns `(logits, *state)`.

    tokens are (batch, 1); the state tensors are those of `recurra.convert.export.programs.state_tensors`, in this order
    and in float32, complex ones with a last dimension of 2. A stream starts from zeros.

    Args:
        model: a language model on the CPU, in float32.
        batch: number of streams, which is fixed.
    """
    step = step_program(model, batch=batch)
    arguments = torch.zeros(batch, 1, dtype=torch.int64), *zero_state(step.state, batch)
    with torch.no_grad():
        program = torch.export.export(RealProgram(step.program).eval(), arguments, strict=False)
        program = program.run_decompositions(
            default_decompositions() | AT_ONE_STEP | {torch.ops.aten.exp2.default: _exp2}
        )
        return bytes(to_edge(program).to_executorch().buffer)


def _exp2(x: Tensor) -> Tensor:  # which ExecuTorch does not have
    return torch.exp(x * math.log(2))
