"""The steps of `cells.GRUCell` on a GPU, in Triton: a program walks through time with 16 sequences.

Taken as torch operations, a step of a few sequences has ten launches, which take the host longer than the card needs
for the numbers. Here all steps are one launch in each direction. A step's gates need all channels of the state before
it, and its candidate all of r h. So a program computes every channel of its sequences, in tiles, and its threads wait
for each other in between; other programs never have to. The interface is that of `_gru_steps`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recurra.ops._operator import last_dim_contiguous
from recurra.ops._toolkit.triton import on_device_of
from recurra.ops.cells._gru_steps import Steps, check_backward

LARGEST = 1024
"""The most channels that the kernels take: from about here on, one processor of a card is slower at reading the
matrices than the host at launching a step. An estimate; nobody has measured it."""
_ROWS, _OUTPUTS, _INPUTS, _WARPS = 16, 128, 32, 8
"""Sequences of a program, and the size of a tile of a matrix."""


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, at, is_in, w, outputs, size, out_stride, in_stride, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    NUMBER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x, `size` long, by the columns `outputs` of a padded w; x is rounded to w's type first."""
    total = tl.zeros([ROWS, N], NUMBER)
    for first in range(0, size, K):
        k = first + tl.arange(0, K)
        x_k = tl.load(x + at[:, None] + k[None, :], mask=is_in[:, None] & (k < size)[None, :], other=0.0)
        w_k = tl.load(w + k[:, None] * in_stride + outputs[None, :] * out_stride)
        x_k = x_k.to(w.dtype.element_ty).to(NUMBER)
        total += tl.dot(x_k, w_k.to(NUMBER), input_precision=PRECISION)
    return total


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    projected, of_gates, of_candidate, ru, c, reset, states, x_batch, x_time, batch, length, size,
    PADDED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill ru (L, B, 2 size), c and reset (L, B, size), and states (L + 1, B, size) behind the first."""
    NUMBER: tl.constexpr = states.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    is_in = row < batch
    here = row * x_batch
    step = program * 0  # rows of steps before this one, in 64 bits
    for _ in range(length):
        before = states + step * size
        for tile in range(0, 2 * PADDED, N):
            gate = tile // PADDED
            n = tile - gate * PADDED + tl.arange(0, N)
            mask = is_in[:, None] & (n < size)[None, :]
            product = _product(
                before, row * size, is_in, of_gates + gate * PADDED * PADDED, n, size, PADDED, 1, ROWS, N, K, NUMBER,
                PRECISION,
            )  # fmt: skip
            x = tl.load(projected + here[:, None] + (gate * size + n)[None, :], mask=mask, other=0.0)
            value = tl.sigmoid(product + x.to(NUMBER))
            tl.store(ru + ((step + row) * 2 * size)[:, None] + (gate * size + n)[None, :], value, mask=mask)
            if gate == 0:
                at = (row * size)[:, None] + n[None, :]
                h = tl.load(before + at, mask=mask, other=0.0)
                tl.store(reset + step * size + at, value * h, mask=mask)
        tl.debug_barrier()  # the gates and r h of all channels are written
        for tile in range(0, PADDED, N):
            n = tile + tl.arange(0, N)
            mask = is_in[:, None] & (n < size)[None, :]
            product = _product(
                reset + step * size, row * size, is_in, of_candidate, n, size, PADDED, 1, ROWS, N, K, NUMBER, PRECISION
            )
            x = tl.load(projected + here[:, None] + (2 * size + n)[None, :], mask=mask, other=0.0)
            candidate = _tanh(product + x.to(NUMBER))
            at = (row * size)[:, None] + n[None, :]
            h = tl.load(before + at, mask=mask, other=0.0)
            u = tl.load(ru + ((step + row) * 2 * size)[:, None] + (size + n)[None, :], mask=mask, other=0.0)
            tl.store(c + step * size + at, candidate, mask=mask)
            tl.store(before + batch * size + at, h + u * (candidate - h), mask=mask)
        tl.debug_barrier()  # the next state is written
        here += x_time
        step += batch


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_y, ru, c, states, of_gates, of_candidate, d_inputs, d_h, y_batch, y_time, batch, length, size,
    PADDED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill d_inputs (L, B, 3 size), and turn d_h (B, size) from the last state's gradient into the first one's."""
    NUMBER: tl.constexpr = states.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    is_in = row < batch
    t = program * 0 + length - 1
    for _ in range(length):
        step = t * batch
        before = states + step * size
        inputs = d_inputs + ((step + row) * 3 * size)[:, None]
        gates = ru + ((step + row) * 2 * size)[:, None]
        for tile in range(0, PADDED, N):
            n = tile + tl.arange(0, N)
            mask = is_in[:, None] & (n < size)[None, :]
            at = (row * size)[:, None] + n[None, :]
            d = tl.load(d_h + at, mask=mask, other=0.0)
            d += tl.load(d_y + (row * y_batch)[:, None] + t * y_time + n[None, :], mask=mask, other=0.0).to(NUMBER)
            h = tl.load(before + at, mask=mask, other=0.0)
            candidate = tl.load(c + step * size + at, mask=mask, other=0.0)
            u = tl.load(gates + (size + n)[None, :], mask=mask, other=0.0)
            tl.store(inputs + (2 * size + n)[None, :], d * u * (1.0 - candidate * candidate), mask=mask)
            tl.store(inputs + (size + n)[None, :], d * (candidate - h) * u * (1.0 - u), mask=mask)
            tl.store(d_h + at, d * (1.0 - u), mask=mask)
        tl.debug_barrier()  # what reaches the candidate and u is written
        for tile in range(0, PADDED, N):
            n = tile + tl.arange(0, N)
            mask = is_in[:, None] & (n < size)[None, :]
            at = (row * size)[:, None] + n[None, :]
            d_reset = _product(
                d_inputs + step * 3 * size + 2 * size, row * 3 * size, is_in, of_candidate, n, size, 1, PADDED, ROWS, N,
                K, NUMBER, PRECISION,
            )  # fmt: skip
            r = tl.load(gates + n[None, :], mask=mask, other=0.0)
            h = tl.load(before + at, mask=mask, other=0.0)
            d = tl.load(d_h + at, mask=mask, other=0.0)
            tl.store(inputs + n[None, :], d_reset * h * r * (1.0 - r), mask=mask)
            tl.store(d_h + at, d + d_reset * r, mask=mask)
        tl.debug_barrier()  # what reaches r is written
        for tile in range(0, PADDED, N):
            n = tile + tl.arange(0, N)
            mask = is_in[:, None] & (n < size)[None, :]
            at = (row * size)[:, None] + n[None, :]
            d = tl.load(d_h + at, mask=mask, other=0.0)
            for gate in range(2):
                d += _product(
                    d_inputs + step * 3 * size + gate * size, row * 3 * size, is_in, of_gates + gate * PADDED * PADDED,
                    n, size, 1, PADDED, ROWS, N, K, NUMBER, PRECISION,
                )  # fmt: skip
            tl.store(d_h + at, d, mask=mask)
        tl.debug_barrier()  # the gradient of the state before is written
        t -= 1


def _padded(weight: Float[Tensor, "*many H H"]) -> Float[Tensor, "*many padded padded"]:
    """Fill matrices up with zeros to whole tiles, so that a kernel reads whole vectors of them."""
    more = -weight.shape[-1] % _OUTPUTS
    return functional.pad(weight.detach(), (0, more, 0, more)).contiguous()


def _matrices(of_gates: Tensor, of_candidate: Tensor) -> tuple[Tensor, Tensor]:
    size = of_candidate.shape[0]
    return _padded(of_gates.unflatten(0, (2, size))), _padded(of_candidate)


def _options(weight: Tensor) -> dict[str, int | str]:
    precision = {torch.bfloat16: "tf32", torch.float64: "ieee"}.get(weight.dtype, "tf32x3")
    return {"PADDED": weight.shape[-1], "ROWS": _ROWS, "N": _OUTPUTS, "K": _INPUTS, "PRECISION": precision}


def forward(
    projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], of_gates: Tensor, of_candidate: Tensor
) -> Steps:
    """Take the steps; the states and all that is kept have h's type, and products are of numbers of the weights'."""
    (batch, length, _), size = projected.shape, h.shape[1]
    inputs, weights = last_dim_contiguous(projected.detach().resolve_neg()), _matrices(of_gates, of_candidate)
    ru = h.new_empty(length, batch, 2 * size)
    c, reset = h.new_empty(2, length, batch, size).unbind()
    states = h.new_empty(length + 1, batch, size)
    states[0] = h
    with on_device_of(states):
        _forward[(triton.cdiv(batch, _ROWS),)](
            inputs, *weights, ru, c, reset, states, *inputs.stride()[:2], batch, length, size, **_options(weights[1]),
            num_warps=_WARPS,
        )  # fmt: skip
    return Steps(ru, c, reset, states)


def backward(
    steps: Steps, of_gates: Tensor, of_candidate: Tensor, d_y: Tensor | None, d_last: Tensor | None
) -> tuple[Float[Tensor, "L B projected"], Float[Tensor, "B H"]]:
    """Return the gradients of the projected inputs, which are those of the products with U too, and of the state."""
    length, batch, size = steps.c.shape
    first = steps.c.new_zeros(batch, size)
    d_y = first[:, None].expand(-1, length, -1) if d_y is None else d_y
    d_last = first if d_last is None else d_last
    check_backward(steps, d_y, d_last, gates=of_gates, candidate=of_candidate)
    d_h = d_last.to(first.dtype, copy=True).contiguous()
    d_y, weights = last_dim_contiguous(d_y.detach().resolve_neg()), _matrices(of_gates, of_candidate)
    d_inputs = steps.c.new_empty(length, batch, 3 * size)
    ru, c, _, states = (x.contiguous() for x in steps)
    with on_device_of(states):
        _backward[(triton.cdiv(batch, _ROWS),)](
            d_y, ru, c, states, *weights, d_inputs, d_h, *d_y.stride()[:2], batch, length, size, **_options(weights[1]),
            num_warps=_WARPS,
        )  # fmt: skip
    return d_inputs, d_h
