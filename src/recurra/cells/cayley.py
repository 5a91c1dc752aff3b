"""The scaled Cayley transform: an orthogonal matrix from a skew-symmetric one, as a parametrization of a weight.

    U = (I + A)^-1 (I - A) D        A = -A^T learned, D diagonal of +-1 fixed

Every orthogonal U has such an A and D (Helfrich, Willmott and Ye, "Orthogonal recurrent neural networks with scaled
Cayley transform", ICML 2018); without D, a U with an eigenvalue -1 has none.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import sentence

NOT_ORTHOGONAL = 1e-3  # ||U^T U - I|| of an assigned matrix
TOO_LARGE = 1e4  # ||A|| when U D has an eigenvalue exp(i theta) with theta within 2e-4 of pi


def skew_symmetric(entries: Float[Tensor, " below"], size: int) -> Float[Tensor, "size size"]:
    """Build A, skew-symmetric by construction, from its strict lower triangle, row by row."""
    row, column = torch.tril_indices(size, size, -1, device=entries.device)
    lower = entries.new_zeros(size, size).index_put((row, column), entries)
    return lower - lower.t()


def lower_entries(a: Float[Tensor, "size size"]) -> Float[Tensor, " below"]:
    """Take the strict lower triangle, row by row."""
    row, column = torch.tril_indices(a.shape[0], a.shape[1], -1, device=a.device)
    return a[row, column]


def draw_skew_symmetric(size: int) -> Float[Tensor, "size size"]:
    """Draw the A to start from: 2x2 blocks [[0, -s], [s, 0]] with s = tan(theta / 2), theta uniform in [0, pi / 2].

    The Cayley transform of a block rotates by theta, so without D the eigenvalues of U start on the right half of the
    unit circle. The authors of scaled Cayley (who write s = sqrt((1 - cos theta) / (1 + cos theta))) and NC-GRU's own
    code (github.com/emucllari1/NC-GRU) do the same; the CRT paper does not say. An odd last row is 0.
    """
    s = torch.tan(torch.rand(size // 2) * (math.pi / 4))
    a = torch.zeros(size, size)
    first = torch.arange(0, size - 1, 2)
    a[first + 1, first] = s
    a[first, first + 1] = -s
    return a


class Cayley(nn.Module):
    """The parametrization of a square weight by the scaled Cayley transform, with an exact solve.

    The solve runs in float64 and is rounded once. In float32, at 380 channels, ||U^T U - I|| (Frobenius) was 6e-6 for
    the A of a fresh cell and above 1e-4 for an A ten times as large; rounded from float64 it is 7e-7 for both. Autocast
    leaves float64 alone, too.

    Args:
        size: rows and columns of the weight.
        rho: the number of signs on the diagonal of D that are -1: the last ones.

    Raises:
        ValueError: rho is negative or above `size`.
    """

    signs: Tensor

    def __init__(self, size: int, rho: int) -> None:
        super().__init__()
        if not 0 <= rho <= size:
            raise ValueError(sentence("rho", rho, f"0 to {size}, a number of signs on a diagonal of {size}"))
        self.size = size
        self.register_buffer("signs", torch.ones(size).index_fill(0, torch.arange(size - rho, size), -1.0))

    def forward(self, entries: Float[Tensor, " below"]) -> Float[Tensor, "size size"]:
        """Return U from the strict lower triangle of A."""
        return exact_rotation(entries, self.size) * self.signs

    @torch.no_grad()
    def error(self, entries: Float[Tensor, " below"]) -> Float[Tensor, ""]:
        """Measure ||U - U_exact|| (Frobenius, in float64) for the strict lower triangle of A."""
        return torch.linalg.matrix_norm(
            self(entries).double() - exact_rotation(entries.double(), self.size) * self.signs
        )

    def right_inverse(self, weight: Float[Tensor, "size size"]) -> Float[Tensor, " below"]:
        """Return the strict lower triangle of the A whose transform is `weight`; called when a weight is assigned.

        Raises:
            ValueError: `weight` is not orthogonal, or weight * D has an eigenvalue too close to -1, for which there is
                no finite A; other signs in D may avoid it.
        """
        rotation = weight.detach().double() * self.signs
        identity = torch.eye(self.size, dtype=torch.float64, device=weight.device)
        # from the right: A (I + Q) = I - Q
        a, _ = torch.linalg.solve_ex(identity + rotation, identity - rotation, left=False)
        if not weight.is_meta:
            self._check(rotation.t() @ rotation - identity, a)
        return lower_entries((a - a.t()) / 2).to(weight.dtype)

    def _check(self, distance: Tensor, a: Tensor) -> None:
        if not float(torch.linalg.matrix_norm(distance)) < NOT_ORTHOGONAL:
            came = f"{float(torch.linalg.matrix_norm(distance)):.1e}"
            raise ValueError(sentence("||U^T U - I||", came, f"below {NOT_ORTHOGONAL}, for an orthogonal matrix"))
        if not float(torch.linalg.matrix_norm(a)) < TOO_LARGE:
            mend = "choose another rho (even if det U = 1, odd if it is -1)"
            raise ValueError(sentence("an eigenvalue of U D", "close to -1", "one that a finite A can give", mend))


def exact_rotation(entries: Tensor, size: int) -> Tensor:
    """Return (I + A)^-1 (I - A), solved in float64 and rounded to the type of `entries`.

    NaN and infinity in A propagate to the result instead of raising.
    """
    a = skew_symmetric(entries.double(), size)
    identity = torch.eye(size, dtype=torch.float64, device=a.device)
    return torch.linalg.solve_ex(identity + a, identity - a)[0].to(entries.dtype)
