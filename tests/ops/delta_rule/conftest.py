"""What the tests of the delta rules share: inputs to draw, and a comparison."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from tests.gradients import require_near
from torch import Tensor
from torch.nn import functional


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    state: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Change the precision."""
        return Inputs(*(x.to(dtype) for x in self))


def draw_inputs(
    length: int, heads: int = 2, d_qk: int = 3, d_v: int = 5, batch: int = 2, per_channel: bool = False
) -> Inputs:
    """Draw float64 inputs with unit keys, decays of which most are near 1, b in [0, 2]; all exact in float32."""
    q, k = torch.randn(2, batch, length, heads, d_qk, dtype=torch.float64)
    v = torch.randn(batch, length, heads, d_v, dtype=torch.float64)
    channels = (d_qk,) if per_channel else ()
    a = torch.sigmoid(2 + 2 * torch.randn(batch, length, heads, *channels, dtype=torch.float64))
    b = 2 * torch.rand(batch, length, heads, dtype=torch.float64)
    state = torch.randn(batch, heads, d_qk, d_v, dtype=torch.float64)
    return Inputs(q, functional.normalize(k, dim=-1), v, a, b, state).to(torch.float32).to(torch.float64)


def draw_generalised(length: int, heads: int = 2, d_qk: int = 3, d_v: int = 5, batch: int = 2) -> list[Tensor]:
    """Draw float64 inputs, exact in float32, with unit vectors that read and up to as much written, as in RWKV-7."""
    q, k, read, rate, decay = torch.randn(5, batch, length, heads, d_qk, dtype=torch.float64)
    v = torch.randn(batch, length, heads, d_v, dtype=torch.float64)
    read, rate = functional.normalize(read, dim=-1), torch.sigmoid(rate)
    state = torch.randn(batch, heads, d_qk, d_v, dtype=torch.float64)
    inputs = q, 0.3 * k, v, torch.exp(-0.6 * torch.sigmoid(decay)), read, -rate * read, state
    return [x.float().double() for x in inputs]


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Sums of n products round n times, in either direction: by about sqrt(n) eps; four of them follow one another."""
    assert len({x.dtype for x in actual}) == 1
    n_terms = inputs[0].shape[1] + inputs[0].shape[-1] + inputs[2].shape[-1]
    require_near(actual, expected, 4 * math.sqrt(n_terms) * torch.finfo(actual[0].dtype).eps, mixed=True)


@pytest.fixture(scope="session", params=[False, True], ids=["a decay per head", "per channel"])
def draw(request):
    return partial(draw_inputs, per_channel=request.param)
