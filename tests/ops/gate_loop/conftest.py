"""What the tests of the GateLoop operator share: inputs to draw, and its equation (9) written out."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    state: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Change the precision; complex numbers stay complex."""
        return Inputs(*(x.to(dtype.to_complex() if x.is_complex() else dtype) for x in self))


class Case(NamedTuple):
    """Sizes of one case: d_a is 1 or d_qk; `complex_` names the complex tensors."""

    heads: int
    d_qk: int
    d_v: int
    d_a: int
    complex_: str = ""

    def draw(self, length: int, batch: int = 2) -> Inputs:
        """Draw float64 inputs with transitions of magnitude below 1, most near 1; all numbers are exact in float32."""
        shapes = {"q": (self.d_qk,), "k": (self.d_qk,), "v": (self.d_v,), "a": (self.d_a,)}
        drawn = {}
        for name, shape in shapes.items():
            kind = torch.complex128 if name in self.complex_ else torch.float64
            drawn[name] = torch.randn(batch, length, self.heads, *shape, dtype=kind)
        magnitude = torch.sigmoid(2 + 2 * torch.randn(drawn["a"].shape, dtype=torch.float64))
        phase = torch.randn(magnitude.shape, dtype=torch.float64)
        drawn["a"] = torch.polar(magnitude, phase) if "a" in self.complex_ else magnitude * phase.sign()
        kind = torch.complex128 if "s" in self.complex_ else torch.float64
        state = torch.randn(batch, self.heads, self.d_qk, self.d_v, dtype=kind)
        return Inputs(**drawn, state=state).to(torch.float32).to(torch.float64)


CASES = {
    "max-headed, real": Case(5, 1, 1, 1),
    "max-headed, complex gates": Case(5, 1, 1, 1, "as"),
    "max-headed, complex gates, real state": Case(3, 1, 1, 1, "a"),
    "max-headed, all complex": Case(3, 1, 1, 1, "qkvas"),
    "scalar gates": Case(2, 3, 2, 1),
    "vector gates": Case(2, 3, 2, 3),
    "complex scalar gates": Case(2, 2, 3, 1, "as"),
    "complex vector gates": Case(1, 2, 2, 2, "as"),
    "complex keys beside real gates": Case(1, 2, 2, 2, "qk"),
}
REAL_CASES = [name for name, case in CASES.items() if not set("qkv") & set(case.complex_)]


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(params=REAL_CASES)
def real_case(request) -> Case:
    """A case with real q, k and v."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def equation_9() -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """y_n = q_n (sum_{m<=n} k_m^T v_m prod_{j=m+1..n} a_j + h_0 prod_{j<=n} a_j), and the bracket at the last n."""

    def compute(inputs: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, a, h0 = (x.detach().resolve_conj().numpy() for x in inputs)
        outputs = []
        for n in range(q.shape[1]):
            h = np.prod(a[:, : n + 1], axis=1)[..., None] * h0
            for m in range(n + 1):
                decay = np.prod(a[:, m + 1 : n + 1], axis=1)
                h = h + (decay * k[:, m])[..., None] * v[:, m, :, None, :]
            outputs.append(np.einsum("bhd,bhdv->bhv", q[:, n], h))
        return torch.from_numpy(np.stack(outputs, 1)), torch.from_numpy(h)

    return compute


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return CASES
