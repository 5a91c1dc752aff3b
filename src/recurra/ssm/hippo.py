"""HiPPO-N: the normal part of the HiPPO-LegS matrix, in its eigenbasis (Gu et al. 2022, arXiv 2111.00396; S5,
arXiv 2208.04933, section 2.3)."""

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from recurra.ssm.diagonal import require_pairs


class HippoNormalModes(NamedTuple):
    """One mode of each conjugate pair of HiPPO-N: eigenvalues -1/2 + i frequency, float64.

    frequency: positive, ascending.
    vectors: the unit eigenvectors as columns; together with their conjugates they form a unitary basis.
    """

    frequency: Float[Tensor, " n"]
    vectors: Complex[Tensor, "N n"]


def hippo_normal_modes(d_state: int) -> HippoNormalModes:
    """Diagonalise HiPPO-N of even size N = d_state.

    HiPPO-LegS is A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it and 0 above. With p_i = sqrt(i + 1/2),
    A + p p^T is -1/2 on the diagonal and skew-symmetric off it: normal, so its eigenvectors are orthogonal.

    Raises:
        ValueError: `d_state` is odd or below 2.
    """
    require_pairs(d_state)
    i = torch.arange(d_state, dtype=torch.float64)
    p = (i + 0.5).sqrt()
    skew = -torch.outer(p, p) * torch.sign(i[:, None] - i)
    frequency, vectors = torch.linalg.eigh(-1j * skew)
    return HippoNormalModes(frequency[d_state // 2 :], vectors[:, d_state // 2 :])
