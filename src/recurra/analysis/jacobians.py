"""Exact Jacobians by reverse-mode differentiation, a block of rows at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Track: TypeAlias = Callable[[Sequence[Tensor], str], Iterable[Tensor]]
"""Yields the items of its first argument in order, and may report progress under the name in its second."""

ROWS = 64
"""Rows that are differentiated together: enough for fast matrix products, few enough to fit into memory."""


def untracked(pieces: Sequence[Tensor], name: str) -> Iterable[Tensor]:
    """Report no progress; the default `Track`."""
    return pieces


def jacobians(
    output: Float[Tensor, " d"], inputs: Sequence[Tensor], name: str, track: Track = untracked
) -> list[Float[Tensor, "d ..."]]:
    """Differentiate a vector by tensors that it was computed from: all rows, exactly, by batched products v^T J.

    The graph is kept, so that other vectors computed from it can be differentiated too.

    Args:
        output: the vector.
        inputs: tensors that require gradients; each Jacobian has the d rows in front of its input's own dimensions.
        name: the name of this work for `track`.
        track: iterates over the blocks of `ROWS` rows.

    Raises:
        RuntimeError: `output` was not computed from one of the inputs.
    """
    rows = torch.eye(len(output), dtype=output.dtype, device=output.device)
    pieces = [_products(output, inputs, piece) for piece in track(rows.split(ROWS), name)]
    return [torch.cat(of_input) for of_input in zip(*pieces)]


def step_jacobians(
    outputs: Float[Tensor, "steps d"], inputs: Sequence[Tensor], name: str, track: Track = untracked
) -> list[Float[Tensor, "steps d _"]]:
    """Differentiate each step's vector by the inputs of the same step; no output may depend on another step's input.

    Args:
        outputs: a vector per step.
        inputs: (steps, channels) each, requiring gradients.
        name: the name of this work for `track`.
        track: iterates over the blocks of `ROWS` rows.
    """
    n_steps, d = outputs.shape
    rows = torch.eye(d, dtype=outputs.dtype, device=outputs.device)[:, None].expand(d, n_steps, d)
    pieces = [_products(outputs, inputs, piece) for piece in track(rows.split(ROWS), name)]
    return [torch.cat(of_input).transpose(0, 1) for of_input in zip(*pieces)]


def spectral_norms(
    matrices: Float[Tensor, "steps d e"], name: str, track: Track = untracked
) -> Float[Tensor, " steps"]:
    """Return the largest singular value of each matrix, from a full decomposition: no iteration that may stop early."""
    pieces = track(matrices.split(1), name)
    return torch.cat([torch.linalg.matrix_norm(piece, ord=2) for piece in pieces])


def _products(output: Tensor, inputs: Sequence[Tensor], vectors: Tensor) -> tuple[Tensor, ...]:
    """v^T J for each v in `vectors`, for each input."""
    # Not is_grads_batched=True, which is an older vmap and loops over the vectors at norms and softmax.
    return torch.vmap(lambda v: torch.autograd.grad(output, list(inputs), v, retain_graph=True))(vectors)
