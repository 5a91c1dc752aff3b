"""NC-GRU, a GRU with an orthogonal candidate matrix, in the form that the CRT paper uses."""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recurra.ops._operator import transforms_are_active
from recurra.ops.cells.gru import GRUCell, RecurrentWeights
from recurra.ops.cells.orthogonal import Cayley, Neumann, NeumannCayley, draw_skew_symmetric, lower_entries


class NCGRUCell(GRUCell):
    """GRUCell with U_c = (I + A)^-1 (I - A) D orthogonal (CRT section 3; Mucllari et al., arXiv:2208.06496).

    With ||U_c|| = 1 and gates near 0 or 1, the bound on ||dh_t / dh_{t-1}||, alpha + beta ||U_c||, is about 1
    (CRT (5), CRT (11)).

    The candidate's Phi is tanh. CRT (4) leaves Phi open for both cells and names only tanh (CRT Lemma 2). Its states
    stay within +-1, which CRT (10)-(11) need. NC-GRU's own code (github.com/emucllari1/NC-GRU) uses modReLU, with which
    they can grow.

    The learned parameter is the strict lower triangle of A, H (H - 1) / 2 numbers, named
    `parametrizations.candidate_weight.original`. `recurra.ops.cells.orthogonal.draw_skew_symmetric` draws its start,
    and `cell.candidate_weight = U` sets it from an orthogonal matrix. D is a buffer. U_c is computed once per call of
    the layer or cell. Without gradients, it is computed again only after A has changed.

    Args:
        input_size: channels D of x.
        hidden_size: channels H of h.
        rho: the number of signs in D that are -1; `hidden_size // 20` if None, the share (50 of 1,000) in the language
            modelling run of NC-GRU's authors. The CRT paper does not say.
        neumann: approximate the inverse by a Neumann series; None for the exact inverse.

    Raises:
        ValueError: a size is below 1, or rho is negative or above `hidden_size`.
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, rho: int | None = None, neumann: Neumann | None = None
    ) -> None:
        super().__init__(input_size, hidden_size)
        rho = hidden_size // 20 if rho is None else rho
        cayley = Cayley(hidden_size, rho) if neumann is None else NeumannCayley(hidden_size, rho, neumann)
        with torch.no_grad():
            start = Cayley.forward(cayley, lower_entries(draw_skew_symmetric(hidden_size)))
        self.candidate_weight = nn.Parameter(start)
        self._kept: tuple[Tensor, tuple[int, int], Tensor] | None = None
        # unsafe: the parameter is a vector, the weight a matrix
        parametrize.register_parametrization(self, "candidate_weight", cayley, unsafe=True)

    @torch.no_grad()
    def orthogonality_error(self) -> Float[Tensor, ""]:
        """Measure ||U_c^T U_c - I|| (Frobenius, in float64)."""
        u = self.candidate_weight.double()
        return torch.linalg.matrix_norm(u.t() @ u - torch.eye(self.hidden_size, dtype=u.dtype, device=u.device))

    def recurrent_weights(self, dtype: torch.dtype | None = None) -> RecurrentWeights:
        """Return the matrices of the products with h in `dtype`, that of the projected x; None keeps their own."""
        return RecurrentWeights(self.gate_weight.to(dtype=dtype), self._orthogonal().to(dtype=dtype))

    def _orthogonal(self) -> Float[Tensor, "H H"]:
        """Return U_c; without gradients, the one kept from an earlier call if A is still the same."""
        entries = self._parametrization.original
        if torch.compiler.is_compiling() or transforms_are_active():
            return self.candidate_weight
        if torch.is_grad_enabled() or type(entries) is not nn.Parameter or entries.is_inference():
            self._kept = None  # also for writers that leave a tensor's version as it is, such as FSDP's
            return self.candidate_weight
        kept, now = self._kept, (entries._version, entries.data_ptr())
        if kept is None or kept[0] is not entries or kept[1] != now:
            with torch.inference_mode(False), torch.no_grad():  # for calls in either mode
                self._kept = kept = entries, now, self.candidate_weight
        return kept[2]

    def cayley_error(self) -> Float[Tensor, ""]:
        """Measure ||U_c - U_exact|| (Frobenius, in float64): what the Neumann series omits, and rounding."""
        return cast(Cayley, self._parametrization[0]).error(self._parametrization.original)

    @property
    def _parametrization(self) -> parametrize.ParametrizationList:
        return cast(parametrize.ParametrizationList, self.get_submodule("parametrizations.candidate_weight"))
