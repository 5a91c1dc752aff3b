"""Orthogonal weights: the scaled Cayley transform of a skew-symmetric matrix, exactly or by a Neumann series; and
NC-GRU, a GRU with an orthogonal candidate matrix, in the form that the CRT paper uses.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recurra.checks import kind_of, require, require_at_least, sentence
from recurra.ops._operator import Operator, transforms_are_active
from recurra.ops.cells.gru import GRUCell, RecurrentWeights

# The scaled Cayley transform:
#
#     U = (I + A)^-1 (I - A) D        A = -A^T learned, D diagonal of +-1 fixed
#
# Every orthogonal U has such an A and D (Helfrich, Willmott and Ye, "Orthogonal recurrent neural networks with scaled
# Cayley transform", ICML 2018); without D, a U with an eigenvalue -1 has none.


_NOT_ORTHOGONAL = 1e-3  # ||U^T U - I|| of an assigned matrix
_TOO_LARGE = 1e4  # ||A|| when U D has an eigenvalue exp(i theta) with theta within 2e-4 of pi


def _skew_symmetric(entries: Float[Tensor, " below"], size: int) -> Float[Tensor, "size size"]:
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
        return _exact_rotation(entries, self.size) * self.signs

    @torch.no_grad()
    def error(self, entries: Float[Tensor, " below"]) -> Float[Tensor, ""]:
        """Measure ||U - U_exact|| (Frobenius, in float64) for the strict lower triangle of A."""
        return torch.linalg.matrix_norm(
            self(entries).double() - _exact_rotation(entries.double(), self.size) * self.signs
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
        if not float(torch.linalg.matrix_norm(distance)) < _NOT_ORTHOGONAL:
            got = f"{float(torch.linalg.matrix_norm(distance)):.1e}"
            raise ValueError(sentence("||U^T U - I||", got, f"below {_NOT_ORTHOGONAL}, for an orthogonal matrix"))
        if not float(torch.linalg.matrix_norm(a)) < _TOO_LARGE:
            hint = "choose another rho (even if det U = 1, odd if it is -1)"
            raise ValueError(sentence("an eigenvalue of U D", "close to -1", "one that a finite A can give", hint))


def _exact_rotation(entries: Tensor, size: int) -> Tensor:
    """Return (I + A)^-1 (I - A), solved in float64 and rounded to the type of `entries`."""
    a = _skew_symmetric(entries.double(), size)
    identity = torch.eye(size, dtype=torch.float64, device=a.device)
    return torch.linalg.solve_ex(identity + a, identity - a)[0].to(entries.dtype)


# After A_0 -> A = A_0 + E the inverse is a Neumann series around the last exact one, S = (I + A_0)^-1:
#
#     (I + A)^-1 = (I + S E)^-1 S = S - (S E) S + (S E)^2 S - ...
#
# ||S|| is at most 1 for every skew-symmetric A_0, so the k-th term is at most ||E||^k: the series converges as long as
# A has moved less than 1 (in the spectral norm) since the last exact inverse.


@dataclass(frozen=True)
class Neumann:
    """How to approximate (I + A)^-1: NC-GRU's own code uses order 2 and an exact inverse every 100 updates.

    These two alone guarantee nothing: the error grows with the learning rate and the number of channels, and one step
    of Adam at 0.001 moves 380 channels further than two terms can follow. So the exact inverse is also computed
    whenever the series could omit more than `tolerance` (our choice), and the default order is higher.
    """

    order: int = 4
    """Terms of the series after S itself: `order` + 1 matrix products."""
    refresh_interval: int = 100
    """Updates of A after which the exact inverse is computed in any case."""
    tolerance: float = 1e-6
    """The most that the series may omit from (I + A)^-1, in the Frobenius norm and apart from rounding; ||U - U_exact||
    is at most twice that, and ||U^T U - I|| four times."""

    def __post_init__(self) -> None:
        require_at_least(1, order=self.order, refresh_interval=self.refresh_interval)
        require(self.tolerance > 0, "tolerance", self.tolerance, "above 0")


class NeumannCayley(Cayley):
    """The parametrization of a square weight by the scaled Cayley transform, with a Neumann series.

    U is 2 (I + A)^-1 D - D, which equals (I + A)^-1 (I - A) D. Its gradient is that of the inverse, -Y^T G Y^T, with
    the approximated inverse for Y: its error is as small as the value's.

    All buffers follow from the history of the weights, never from the inputs. The A of the last exact inverse
    (`reference`), the A of the last call (`latest`) and the number of updates between them (`age`) are saved and
    loaded, so that a resumed training computes its exact inverses at the same updates. The inverses that belong to them
    are recomputed when a state is loaded and when the module changes its type. While A does not change, a call costs
    one comparison and one copy.

    Args:
        size: rows and columns of the weight.
        rho: the number of signs on the diagonal of D that are -1: the last ones.
        settings: order, refresh interval and tolerance.

    Raises:
        ValueError: rho is negative or above `size`.
    """

    reference: Tensor
    latest: Tensor
    age: Tensor
    inverse: Tensor
    current: Tensor

    def __init__(self, size: int, rho: int, settings: Neumann) -> None:
        super().__init__(size, rho)
        self.settings = settings
        self.register_buffer("reference", torch.zeros(size * (size - 1) // 2))
        self.register_buffer("latest", torch.zeros_like(self.reference))
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))
        self.register_buffer("inverse", torch.eye(size), persistent=False)
        self.register_buffer("current", torch.eye(size), persistent=False)

    def forward(self, entries: Float[Tensor, " below"]) -> Float[Tensor, "size size"]:
        """Return U from the strict lower triangle of A.

        Raises:
            TypeError: `entries` is neither float32 nor float64; products in a shorter type give no orthogonal U.
        """
        if entries.dtype not in (torch.float32, torch.float64):
            hint = "use the exact inverse for other types"
            raise TypeError(sentence("A", kind_of(entries), "float32 or float64", hint))
        buffers = self.reference, self.latest, self.age, self.inverse, self.current
        settings = self.settings.order, self.settings.refresh_interval, self.settings.tolerance
        inverse = _neumann_inverse(entries.detach(), *buffers, *settings)
        inverse = _Inverse.apply(_skew_symmetric(entries, self.size), inverse)
        return (2 * inverse - torch.eye(self.size, dtype=inverse.dtype, device=inverse.device)) * self.signs

    def _restore(self) -> None:
        self.inverse = _into(self.inverse, _exact_inverse(self.reference, self.size))
        current, remainder = _series(self.latest, self.reference, self.inverse, self.settings.order)
        # they may not belong together if only some of them were loaded
        within = remainder <= self.settings.tolerance
        self.current = _into(self.current, torch.where(within, current, _exact_inverse(self.latest, self.size)))

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._restore()

    def _apply(self, fn: Any, recurse: bool = True) -> "NeumannCayley":
        super()._apply(fn, recurse)
        self._restore()
        return self


def _into(buffer: Tensor, value: Tensor) -> Tensor:
    """Write a value into the buffer, which processes may share, if it fits, and return what has the value."""
    fits = (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device)
    return buffer.copy_(value) if fits else value


def _exact_inverse(entries: Float[Tensor, " below"], size: int) -> Float[Tensor, "size size"]:
    """Return (I + A)^-1, inverted in float64 and rounded to the type of `entries`."""
    a = _skew_symmetric(entries.double(), size)
    identity = torch.eye(size, dtype=torch.float64, device=a.device)
    # rows first, as in a buffer that was copied into: products in another layout round differently
    return torch.linalg.inv_ex(identity + a)[0].to(entries.dtype).contiguous()


def _series(
    entries: Float[Tensor, " below"],
    reference: Float[Tensor, " below"],
    inverse: Float[Tensor, "size size"],
    order: int,
) -> tuple[Float[Tensor, "size size"], Float[Tensor, ""]]:
    """Return (I + A)^-1 by `order` terms after `inverse`, that of `reference`, and a bound on what they omit."""
    with torch.autocast(entries.device.type, enabled=False):
        # the difference of the A's themselves: no digits are lost where it is small
        step = inverse @ _skew_symmetric(reference - entries, inverse.shape[0])
        term, correction = inverse, torch.zeros_like(inverse)
        for _ in range(order):
            term = step @ term
            correction = correction + term
        norm = torch.linalg.matrix_norm(step)
        remainder = torch.linalg.matrix_norm(term) * norm / (1 - norm)
        return inverse + correction, torch.where(norm < 1, remainder, torch.inf)


def _run(result, entries, reference, latest, age, inverse, current, order, refresh_interval, tolerance):  # type: ignore[no-untyped-def]
    if not torch.equal(entries, latest):
        latest.copy_(entries)
        age.add_(1)
        approximated, remainder = _series(entries, reference, inverse, order)
        # NaN fails the comparison, too: then the exact inverse propagates it
        if int(age) >= refresh_interval or not float(remainder) <= tolerance:
            reference.copy_(entries)
            age.zero_()
            inverse.copy_(_exact_inverse(entries, inverse.shape[0]))
            approximated = inverse
        current.copy_(approximated)
    result.copy_(current)


_neumann_inverse = Operator(
    "neumann_inverse(Tensor entries, Tensor(a!) reference, Tensor(b!) latest, Tensor(c!) age, Tensor(d!) inverse, "
    "Tensor(e!) current, int order, int refresh_interval, float tolerance) -> Tensor",
    check=lambda *_: None,
    allocate=lambda *arguments: torch.empty_like(arguments[5]),
    run=_run,
    flops=lambda *arguments: 2 * arguments[4][0] ** 3 * (arguments[6] + 1),
    devices=("CompositeExplicitAutograd",),
)


class _Inverse(torch.autograd.Function):
    """Y = (I + A)^-1, already computed, as a function of A: dY = -Y dA Y."""

    @staticmethod
    def forward(a: Tensor, inverse: Tensor) -> Tensor:
        return inverse.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            return -(inverse.t() @ gradient @ inverse.t()), None


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
