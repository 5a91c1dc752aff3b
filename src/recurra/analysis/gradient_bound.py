"""Bounds on how much a gradient can grow along a GRU (CRT (5)-(10))."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.cells import GRUCell


class StepBound(NamedTuple):
    """The terms of the bound on ||dh_t/dh_{t-1}||_2 at each step (CRT Lemma 1).

    alpha: CRT (6).
    beta: CRT (7).
    candidate_norm: ||U_c||_2, the same at each step.
    """

    alpha: Float[Tensor, " steps"]
    beta: Float[Tensor, " steps"]
    candidate_norm: Float[Tensor, ""]

    @property
    def norm(self) -> Float[Tensor, " steps"]:
        """alpha_t + beta_t ||U_c||_2, the right side of CRT (5)."""
        return self.alpha + self.beta * self.candidate_norm


@torch.no_grad()
def step_bound(cell: GRUCell, x: Float[Tensor, "steps D"], h: Float[Tensor, "steps H"]) -> StepBound:
    """Bound ||dh_t/dh_{t-1}||_2 at each step, given its gates, by CRT (6)-(9).

        alpha = delta_u (max |h_{t-1}| + max |c_t|) ||U_u|| + max(1 - u_t)      delta_u = max(u_t (1 - u_t))
        beta  = max(u_t) (delta_r ||U_r|| max |h_{t-1}| + max(r_t))             delta_r = max(r_t (1 - r_t))

    each maximum over the channels. The derivative of CRT (4) is

        diag(1 - u) + diag((c - h) u (1 - u)) U_u + diag(u (1 - c^2)) U_c (diag(r) + diag(h r (1 - r)) U_r)

    and |c - h| <= max |h| + max |c| and 1 - c^2 <= 1 give the bound. The paper writes max h and max c without absolute
    values. States and candidates can be negative, and without absolute values the inequality would not hold (h = -0.9
    in all channels would make its term negative).

    Args:
        cell: the cell; use float64 if rounding must not break the bound.
        x: the input of each step.
        h: the state before each step.
    """
    reset, update, candidate = cell.gates(cell.project(x), h, cell.recurrent_weights(x.dtype))
    largest_state, largest_candidate = h.abs().amax(-1), candidate.abs().amax(-1)
    norms = RecurrentNorms.of(cell)
    alpha = _slope(update) * (largest_state + largest_candidate) * norms.update + (1 - update).amax(-1)
    beta = update.amax(-1) * (_slope(reset) * norms.reset * largest_state + reset.amax(-1))
    return StepBound(alpha, beta, norms.candidate)


@torch.no_grad()
def a_priori_step_bound(cell: GRUCell) -> Float[Tensor, ""]:
    """Bound alpha + beta ||U_c||_2 for all inputs, given only the weights (CRT Lemma 2, CRT (10)).

    (||U_u|| / 2 + 1) + (||U_r|| / 4 + 1) ||U_c||, for states within [-1, 1]; a chain that starts there stays there.
    """
    norms = RecurrentNorms.of(cell)
    return norms.update / 2 + 1 + (norms.reset / 4 + 1) * norms.candidate


class RecurrentNorms(NamedTuple):
    """The spectral norms of a cell's recurrent matrices: ||U_r||_2, ||U_u||_2 and ||U_c||_2."""

    reset: Float[Tensor, ""]
    update: Float[Tensor, ""]
    candidate: Float[Tensor, ""]

    @classmethod
    def of(cls, cell: GRUCell) -> "RecurrentNorms":
        """Compute the norms of a cell's matrices."""
        rows = (cell.reset, cell.update, cell.candidate)
        return cls(*(torch.linalg.matrix_norm(row.recurrent, ord=2) for row in rows))


def log10_products(factors: Float[Tensor, " steps"]) -> Float[Tensor, " steps"]:
    """For each step, return log10 of the product of all later steps' factors; 0 for the last step.

    Logarithms are needed because the product of a few hundred factors can exceed float64.
    """
    return _of_later_steps(factors.log10().flip(0).cumsum(0).flip(0), nothing=0.0)


def log10_powers(factors: Float[Tensor, " steps"]) -> Float[Tensor, " steps"]:
    """For each step, return log10 of the largest later factor to the power of their number, as CRT (2) writes it."""
    largest = _of_later_steps(factors.flip(0).cummax(0).values.flip(0), nothing=1.0)
    n_later = torch.arange(len(factors) - 1, -1, -1, dtype=factors.dtype, device=factors.device)
    return n_later * largest.log10()


def _slope(gate: Tensor) -> Tensor:
    """Return the largest slope of the gate's sigmoid over the channels, CRT (8)-(9)."""
    return (gate * (1 - gate)).amax(-1)


def _of_later_steps(values: Tensor, nothing: float) -> Tensor:
    return torch.cat([values[1:], values.new_full((1,), nothing)])
