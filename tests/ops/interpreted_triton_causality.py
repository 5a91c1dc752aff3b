"""The Triton kernels: a step changes nothing before it, its gradient nothing after it. tests/test_triton.py runs it."""

from dataclasses import replace

import pytest
import torch
from tests.quick_interpreter import DEVICE, INTERPRETED

from recurra import delta_rule, gate_loop, linear_scan
from recurra.ops._toolkit.triton import default_tiles
from recurra.ops.delta_rule import _triton_chunk as delta_chunk
from recurra.ops.delta_rule import operator as delta_operator
from recurra.ops.gate_loop import _triton_chunk as triton_chunk
from recurra.ops.gate_loop._heads import chunk_by_kernels
from recurra.ops.selective_scan import selective_scan

# on a card, which cannot multiply few steps, chunks of 32
SCALE = 1 if INTERPRETED else 4
LENGTH, LATER, EARLIER, CHUNK = 10 * SCALE, 9 * SCALE, 3 * SCALE, 8 * SCALE
ROUNDING = 8 * torch.finfo(torch.float32).eps


def heads(d: int, d_a: int, *, is_complex: bool = False) -> list[torch.Tensor]:
    """q, k, v, a and no state."""
    q, k, v, a = (torch.randn(1, LENGTH, 1, size, device=DEVICE) for size in (d, d, d, d_a))
    a = torch.sigmoid(a + 2)
    a = torch.polar(a, 3 * a) if is_complex else a
    return [q, k, v, a]


def chunk(q, k, v, a):
    return chunk_by_kernels(q, k, v, a, a.new_zeros(1, 1, q.shape[-1], v.shape[-1]))[0]


def fused(q, k, v, a):
    return gate_loop(q, k, v, a, mode="fused", backend="triton")[0]


def scan(b, a):
    return linear_scan(a, b, backend="triton")


def delta(q, k, v, a):
    return delta_rule(q, k.tanh(), v, a, a, backend="triton")[0]


def delta_in_chunks(q, k, v, a):
    b, state = a[..., :1], a.new_zeros(1, 1, q.shape[-1], v.shape[-1])
    return delta_operator.chunk_by_kernels(q, k.tanh(), v, a, b, state)[0]


def selective(x, b, c, step):
    return selective_scan(x, step, -step.new_ones(3, 3), b, c, step.new_zeros(1, 3, 3), backend="triton")[0]


CASES = {
    "scan": (scan, lambda: [x[:, :, 0] for x in heads(3, 3)[2:]]),
    "scan, complex": (scan, lambda: [x[:, :, 0] for x in heads(3, 3, is_complex=True)[2:]]),
    "fused": (fused, lambda: heads(1, 1)),
    "fused, complex": (fused, lambda: heads(1, 1, is_complex=True)),
    "delta rule": (delta, lambda: heads(3, 1)),
    "selective scan": (selective, lambda: [x[:, :, 0] for x in heads(3, 3)]),
    "chunk": (chunk, lambda: heads(3, 1)),
    "chunk, a gate a channel": (chunk, lambda: heads(3, 3)),
    "chunk, complex": (chunk, lambda: heads(3, 3, is_complex=True)),
    "chunk, delta rule": (delta_in_chunks, lambda: heads(3, 3)),
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    def short(kernel, number, is_complex, device):
        return replace(default_tiles("chunk", is_complex), block=CHUNK // 2, span=CHUNK)

    monkeypatch.setattr(triton_chunk, "tiles_for", short)
    monkeypatch.setattr(delta_chunk, "_T", CHUNK // 2)


def require_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", CASES)
def test_outliers(name: str):
    """Finite ones stay apart everywhere; within a chunk, an infinity reaches other steps as NaN, which NaN does too."""
    function, draw = CASES[name]
    *inputs, a = tensors = [x.requires_grad_() for x in draw()]
    y = function(*tensors)
    given = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, given, retain_graph=True)
    for value in (1e6, torch.inf) if name.startswith("chunk") else (1e6, torch.inf, torch.nan):
        in_chunk = name.startswith("chunk") and value != 1e6
        changed = given.clone()
        changed[0, EARLIER] = value
        after = CHUNK if in_chunk else EARLIER + 1
        for mine, right in zip(torch.autograd.grad(y, tensors, changed, retain_graph=True), expected):
            require_same(mine[:, after:], right[:, after:])
        changed = [x.detach().index_fill(1, torch.tensor([LATER], device=DEVICE), value) for x in inputs]
        before = CHUNK if in_chunk else LATER
        require_same(function(*changed, a.detach())[:, :before], y.detach()[:, :before])
