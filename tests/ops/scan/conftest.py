"""What the tests of the scans share: a plain loop to compare with, and numbers to draw."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def plain_scan() -> Callable[..., Tensor]:
    """The recurrence as a NumPy loop in double precision, for any shapes that broadcast: a test's own arithmetic."""

    def scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
        is_complex = any(x is not None and x.is_complex() for x in (a, b, h0))
        wide = torch.complex128 if is_complex else torch.float64
        numbers = lambda x: x.detach().to(wide).resolve_conj().resolve_neg().numpy()  # noqa: E731
        a_, b_ = numbers(a.expand(b.shape)), numbers(b)
        h = np.zeros_like(b_[:, 0]) if h0 is None else numbers(h0)
        states = np.empty_like(b_)
        for t in sorted(range(b_.shape[1]), reverse=reverse):
            h = a_[:, t] * h + b_[:, t]
            states[:, t] = h
        return torch.from_numpy(states)

    return scan


@pytest.fixture(scope="session")
def gates() -> Callable[..., Tensor]:
    """Draw transitions of magnitude below 1, with a phase if they are complex."""

    def draw(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (torch.randn(shape, dtype=wide) * 0.5).tanh().to(dtype).requires_grad_(requires_grad)

    return draw
