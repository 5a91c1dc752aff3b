"""Small calls that reach every kernel, forward and backward, at sizes that do not fit their vectors."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from recurra import gate_loop, linear_scan
from recurra.decoding.linear import DTYPES, DecodingLinear
from recurra.layers.cross_entropy import cross_entropy
from recurra.mixers.base import create_mixer
from recurra.ops.cells.gru import GRUCell, gru_sequence
from recurra.ops.delta_rule.operator import delta_rule
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part
from recurra.ops.selective_scan.operator import selective_scan

_FLOATS, _COMPLEX = torch.float32, torch.complex64


def _draw(*shape: int, dtype: torch.dtype = _FLOATS, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=dtype)).requires_grad_()


def _differentiate(call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
    outputs = call(*inputs)
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    torch.autograd.grad(torch.stack([output.abs().square().sum() for output in outputs]).sum(), needed)


def _scan(row: int, dtype: torch.dtype) -> None:
    a, b = _draw(2, 19, row, dtype=dtype, scale=0.5), _draw(2, 19, row, dtype=dtype)
    _differentiate(lambda *given: (linear_scan(*given),), a, b)


def _fused_gate_loop() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, re: Tensor, im: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return gate_loop_real_part(q, k, v, Planes(re, im), state=state)

    planes = [_draw(2, 19, 21, 1, scale=0.5) for _ in range(5)]
    _differentiate(call, *planes, _draw(2, 21, 1, 1, dtype=_COMPLEX))


def _heads(dtype: torch.dtype, gates: int) -> None:
    q, k, v = _draw(2, 19, 3, 5, dtype=dtype), _draw(2, 19, 3, 5, dtype=dtype), _draw(2, 19, 3, 7, dtype=dtype)
    a = _draw(2, 19, 3, gates, dtype=dtype, scale=0.5)
    _differentiate(lambda *given: gate_loop(*given, mode="chunk"), q, k, v, a)


def _gru() -> None:
    cell = GRUCell(11, 21)
    weights = cell.recurrent_weights(_FLOATS)
    _differentiate(lambda x, h: gru_sequence(cell, cell.project(x), h, weights), _draw(2, 9, 11), _draw(2, 21))


_MIXERS: dict[str, dict[str, int]] = {
    "gru": {},
    "slstm": {"n_heads": 2},
    "performer": {"n_heads": 2},
    "mamba3": {"d_state": 24, "n_heads": 2},
    "gated-delta-net": {"n_heads": 2},
    "rwkv7": {"n_heads": 2},
}
"""Mixers with kernels of their own."""


def _mixer(name: str, **options: int) -> None:
    layer = create_mixer(name, 22, **options)
    _differentiate(lambda x: layer(x)[:1], _draw(2, 9, 22))


def _selective() -> None:
    step = torch.rand(2, 19, 21).requires_grad_()
    a = (-torch.rand(21, 5)).requires_grad_()
    _differentiate(selective_scan, _draw(2, 19, 21), step, a, _draw(2, 19, 5), _draw(2, 19, 5), _draw(2, 5, 21))


def _delta() -> None:
    with torch.no_grad():
        q, k = nn.functional.normalize(_draw(2, 19, 3, 5), dim=-1), nn.functional.normalize(_draw(2, 19, 3, 5), dim=-1)
        delta_rule(q, k, _draw(2, 19, 3, 7), torch.rand(2, 19, 3), torch.rand(2, 19, 3))


def _loss() -> None:
    _differentiate(lambda x: (cross_entropy(x, torch.randint(37, (11,))),), _draw(11, 37))


def _decode(numbers: str, vectors: int) -> None:
    with torch.no_grad():
        DecodingLinear(nn.Linear(150, 70), numbers)(torch.randn(vectors, 150))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and call of every case."""
    for row, dtype in product((5, 83), (_FLOATS, _COMPLEX)):
        yield f"linear_scan, {row} channels, {dtype}".replace("torch.", ""), partial(_scan, row, dtype)
    yield "gate_loop, fused", _fused_gate_loop
    for dtype, gates in ((_FLOATS, 1), (_COMPLEX, 5)):
        yield f"gate_loop, heads, {dtype}".replace("torch.", ""), partial(_heads, dtype, gates)
    yield "GRU", _gru
    for name, options in _MIXERS.items():
        yield f"the mixer {name}", partial(_mixer, name, **options)
    yield "selective_scan", _selective
    yield "delta_rule", _delta
    yield "cross_entropy", _loss
    for numbers, vectors in product(DTYPES, (1, 11)):
        yield f"decoding, {numbers}, {vectors} vectors", partial(_decode, numbers, vectors)
