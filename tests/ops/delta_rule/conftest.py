"""What the tests of the delta rule share: inputs to draw."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
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


@pytest.fixture(scope="session", params=[False, True], ids=["a decay per head", "per channel"])
def draw(request):
    return partial(draw_inputs, per_channel=request.param)
