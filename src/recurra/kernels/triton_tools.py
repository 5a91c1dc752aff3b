"""What Triton kernels share: a plan that fills the card, the places of a program, loads, stores and products.

A program walks over time for a tile of neighbouring channels. Where sequences and channels are too few to fill the
card, time is cut into chunks as well. Complex numbers lie interleaved (real, imaginary), as torch keeps them. Where
numbers are real, the imaginary parts in a kernel are copies of the real ones, which the compiler drops.

How finely work is divided follows from `recurra.kernels.triton_tiles`.
"""

from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.kernels.triton_tiles import WalkTiles


class Plan(NamedTuple):
    """The layout of a scan: `chunks` of `span` steps each (the last can be shorter), tiles of `block` channels.

    A program has `warps`, and reads `stages` steps ahead.
    """

    span: int
    chunks: int
    block: int
    warps: int = 1
    stages: int = 4

    @property
    def options(self) -> dict[str, int]:
        """What the launch of a kernel takes besides its arguments."""
        return {"BLOCK": self.block, "STAGES": self.stages, "num_warps": self.warps}


def plan(batch: int, length: int, channels: int, device: torch.device, tiles: WalkTiles = WalkTiles()) -> Plan:  # noqa: B008
    """Cut time as finely as it takes to fill the device, but into chunks that are worth it."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = processors * tiles.lanes // (batch * channels)
    chunks = max(1, min(wanted, length // tiles.shortest_chunk, isqrt(length)))
    span = -(-length // chunks)
    block = min(tiles.channels, triton.next_power_of_2(channels))
    return Plan(span, -(-length // span), block, max(1, block // tiles.channels_per_warp), tiles.stages)


def grid(batch: int, chunks: int, channels: int, laid_out: Plan) -> tuple[int]:
    """Count the programs: one per sequence, chunk and tile, in the order of `place`."""
    return (batch * chunks * triton.cdiv(channels, laid_out.block),)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's own card; Triton would use the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def floats(tensor: Tensor) -> Tensor:
    """Return a tensor as a kernel can read it: a complex one as floats (real, imaginary)."""
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@triton.jit
def load(pointer, mask, IS_COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read real and imaginary parts, which are neighbours, in one go."""
    if IS_COMPLEX:
        re, im = tl.split(tl.load(pointer[:, None] + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0.0))
    else:
        re = tl.load(pointer, mask=mask, other=0.0)
        im = re
    return re, im


@triton.jit
def store(pointer, re, im, mask, IS_COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write real and imaginary parts."""
    if IS_COMPLEX:
        tl.store(pointer[:, None] + tl.arange(0, 2)[None, :], tl.join(re, im), mask=mask[:, None])
    else:
        tl.store(pointer, re, mask=mask)


@triton.jit
def multiply(x_re, x_im, y_re, y_im, IS_COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x y."""
    re = x_re * y_re
    im = re
    if IS_COMPLEX:
        re = re - x_im * y_im
        im = x_re * y_im + x_im * y_re
    return re, im


@triton.jit
def multiply_conjugate(x_re, x_im, y_re, y_im, IS_COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x conj(y)."""
    re = x_re * y_re
    im = re
    if IS_COMPLEX:
        re = re + x_im * y_im
        im = x_im * y_re - x_re * y_im
    return re, im


@triton.jit
def place(channels, chunks, span, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's sequence, chunk and channels, and the step at which its chunk starts."""
    program = tl.program_id(0).to(tl.int64)  # 64 bits, because offsets beyond 2^31 follow from it
    tiles = tl.cdiv(channels, BLOCK)
    d = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    chunk = (program // tiles) % chunks
    return program // tiles // chunks, chunk, d, d < channels, chunk * span
