"""The Neumann-Cayley transform: the scaled Cayley transform with (I + A)^-1 from a series of matrix products.

After A_0 -> A = A_0 + E the inverse is a Neumann series around the last exact one, S = (I + A_0)^-1:

    (I + A)^-1 = (I + S E)^-1 S = S - (S E) S + (S E)^2 S - ...

||S|| is at most 1 for every skew-symmetric A_0, so the k-th term is at most ||E||^k: the series converges as long as
A has moved less than 1 (in the spectral norm) since the last exact inverse.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.cells.cayley import Cayley, skew_symmetric
from recurra.checks import kind_of, require, require_at_least, sentence
from recurra.kernels.operator import Operator


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
            mend = "use the exact inverse for other types"
            raise TypeError(sentence("A", kind_of(entries), "float32 or float64", mend))
        buffers = self.reference, self.latest, self.age, self.inverse, self.current
        settings = self.settings.order, self.settings.refresh_interval, self.settings.tolerance
        inverse = _neumann_inverse(entries.detach(), *buffers, *settings)
        inverse = _Inverse.apply(skew_symmetric(entries, self.size), inverse)
        return (2 * inverse - torch.eye(self.size, dtype=inverse.dtype, device=inverse.device)) * self.signs

    def _restore(self) -> None:
        self.inverse = _into(self.inverse, exact_inverse(self.reference, self.size))
        current, remainder = series(self.latest, self.reference, self.inverse, self.settings.order)
        # they may not belong together if only some of them were loaded
        within = remainder <= self.settings.tolerance
        self.current = _into(self.current, torch.where(within, current, exact_inverse(self.latest, self.size)))

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


def exact_inverse(entries: Float[Tensor, " below"], size: int) -> Float[Tensor, "size size"]:
    """Return (I + A)^-1, inverted in float64 and rounded to the type of `entries`."""
    a = skew_symmetric(entries.double(), size)
    identity = torch.eye(size, dtype=torch.float64, device=a.device)
    # rows first, as in a buffer that was copied into: products in another layout round differently
    return torch.linalg.inv_ex(identity + a)[0].to(entries.dtype).contiguous()


def series(
    entries: Float[Tensor, " below"],
    reference: Float[Tensor, " below"],
    inverse: Float[Tensor, "size size"],
    order: int,
) -> tuple[Float[Tensor, "size size"], Float[Tensor, ""]]:
    """Return (I + A)^-1 by `order` terms after `inverse`, which is that of `reference`, and a bound on what they omit.

    Each omitted term is smaller than the one before by ||S E||; Frobenius norms bound the geometric series.
    """
    with torch.autocast(entries.device.type, enabled=False):
        # the difference of the A's themselves: no digits are lost where it is small
        step = inverse @ skew_symmetric(reference - entries, inverse.shape[0])
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
        approximated, remainder = series(entries, reference, inverse, order)
        # NaN fails the comparison, too: then the exact inverse propagates it
        if int(age) >= refresh_interval or not float(remainder) <= tolerance:
            reference.copy_(entries)
            age.zero_()
            inverse.copy_(exact_inverse(entries, inverse.shape[0]))
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
