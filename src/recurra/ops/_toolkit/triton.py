"""What Triton kernels share: launch grids, loads and stores, and the tile sizes by which they divide their work."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra._files.reading import read_json
from recurra.checks import choose, require

# Tiles: the sizes by which the kernels divide their work.
# `triton_tiles.json` beside this file has what `python -m benchmarks.gpu.tuning` found, by card, kernel and type of
# numbers. A card that is not in it takes the sizes of one with the same compute capability, and without one the
# defaults, which are estimates. No size changes a result beyond its rounding. The environment variable RECURRA_TILES
# names another file of that form, whose entries take the place of the package's.


TABLE = Path(__file__).with_name("triton_tiles.json")
FORMAT = 1
_POWERS = dict.fromkeys(2**n for n in range(14))


@dataclass(frozen=True)
class WalkTiles:
    """How a walk over time is divided: the linear scan and the fused GateLoop."""

    channels: int = 128  # the most of one program
    channels_per_warp: int = 64
    lanes: int = 1024  # channels walked at once on a multiprocessor, to hide the memory's latency; time is cut to them
    shortest_chunk: int = 32  # steps
    stages: int = 4  # steps whose reads are in flight in a program

    def __post_init__(self) -> None:
        for name in ("channels", "channels_per_warp", "lanes", "shortest_chunk"):
            choose(name, _POWERS, getattr(self, name))
        require(1 <= self.stages <= 8, "stages", self.stages, "1 to 8")


@dataclass(frozen=True)
class ChunkTiles:
    """How the GateLoop in chunks is divided."""

    span: int = 64  # steps per chunk, a multiple of `block`
    block: int = 16  # steps per block; matrix products take 16 or more
    tile: int = 32  # columns of the state in one program
    warps: int = 4
    key_tile: int = 32  # rows of the state in one program for dq, dk and da, which holds two states and may spill
    key_warps: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            choose(name, _POWERS, value)
        require(self.span >= self.block, "span", self.span, f"at least block, {self.block}")
        for name in ("warps", "key_warps"):
            require(getattr(self, name) <= 16, name, getattr(self, name), "at most 16")


Tiles = WalkTiles | ChunkTiles
KERNELS: dict[str, type[Tiles]] = {"scan": WalkTiles, "fused": WalkTiles, "chunk": ChunkTiles}
Table = Mapping[str, Mapping[str, Any]]
_tried: dict[str, Tiles] = {}


def default_tiles(kernel: str, is_complex: bool) -> Tiles:
    """Give the sizes of a kernel on a card that nobody measured."""
    if kernel == "chunk":
        return ChunkTiles(tile=16, key_tile=16) if is_complex else ChunkTiles()
    return WalkTiles(stages=4 if kernel == "scan" else 3)  # the fused kernels read up to nine tensors


def number_key(number: torch.dtype, is_complex: bool) -> str:
    """Name the numbers of a call as the table does: the type of q, or of the scan's planes, and kind of the gates."""
    return str(number).removeprefix("torch.") + (" complex" if is_complex else "")


def tiles_for(kernel: str, number: torch.dtype, is_complex: bool, device: torch.device) -> Any:
    """Look up the sizes of a kernel for a type of numbers on a device."""
    if kernel in _tried:
        return _tried[kernel]
    index = (torch.cuda.current_device() if device.index is None else device.index) if device.type == "cuda" else None
    return _tiles_for(kernel, number, is_complex, index, os.environ.get("RECURRA_TILES"))


@lru_cache(maxsize=256)
def _tiles_for(kernel: str, number: torch.dtype, is_complex: bool, index: int | None, path: str | None) -> Tiles:
    if index is None:  # the interpreter
        return default_tiles(kernel, is_complex)
    properties = torch.cuda.get_device_properties(index)
    table = read_table(TABLE)
    if path:
        table = merged(table, read_table(Path(path)))
    return look_up(table, properties.name, f"{properties.major}.{properties.minor}", kernel, number, is_complex)


def look_up(table: Table, device: str, capability: str, kernel: str, number: torch.dtype, is_complex: bool) -> Tiles:
    """Find a kernel's sizes in a table: of the device, else of one with its compute capability, else the defaults."""
    alike = (name for name in sorted(table) if table[name]["capability"] == capability)
    for name in (device, *alike):
        found = table.get(name, {}).get(kernel, {}).get(number_key(number, is_complex))
        if found is not None:
            return KERNELS[kernel](**found)
    return default_tiles(kernel, is_complex)


def read_table(path: Path) -> Table:
    """Read a table of sizes, and refuse those that no kernel takes."""
    content = read_json(path, "the table of tiles")
    require(content.get("format") == FORMAT, f"the format of {path}", content.get("format"), f"{FORMAT}")
    merged({}, content["devices"])
    return content["devices"]


def with_entry(table: Table, device: str, capability: str, kernel: str, key: str, tiles: Tiles) -> Table:
    """Give a table with one more entry, or another one in its place."""
    kernels = dict(table.get(device, {})) | {"capability": capability}
    kernels[kernel] = dict(kernels.get(kernel, {})) | {key: asdict(tiles)}
    return {**table, device: kernels}


def merged(table: Table, newer: Table) -> Table:
    """Give a table with the entries of a newer one, over older ones of the same card, kernel and type of numbers."""
    for device, kernels in newer.items():
        for kernel, by_number in kernels.items():
            for key, tiles in by_number.items() if kernel != "capability" else ():
                table = with_entry(table, device, kernels["capability"], kernel, key, KERNELS[kernel](**tiles))
    return table


@contextmanager
def trying(kernel: str, tiles: Tiles) -> Iterator[None]:
    """Run a kernel with other sizes than the table's, to measure them."""
    before = dict(_tried)
    _tried[kernel] = tiles
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)


def forget() -> None:
    """Read the table again in the next call."""
    _tiles_for.cache_clear()


# What kernels share: a plan that fills the card, the places of a program, loads, stores and products.
# A program walks over time for a tile of neighbouring channels. Where sequences and channels are too few to fill the
# card, time is cut into chunks as well. Complex numbers lie interleaved (real, imaginary), as torch keeps them. Where
# numbers are real, the imaginary parts in a kernel are copies of the real ones, which the compiler drops.


class Plan(NamedTuple):
    """A scan in `chunks` of `span` steps (the last can be shorter) and tiles of `block` channels."""

    span: int
    chunks: int
    block: int
    warps: int = 1
    stages: int = 4  # steps read ahead

    @property
    def options(self) -> dict[str, int]:
        """What the launch of a kernel takes besides its arguments."""
        return {"BLOCK": self.block, "STAGES": self.stages, "num_warps": self.warps}


def plan(batch: int, length: int, channels: int, device: torch.device, tiles: WalkTiles = WalkTiles()) -> Plan:
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
