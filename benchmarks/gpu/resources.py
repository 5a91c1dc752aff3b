"""Registers, spills and shared memory of the Triton kernels on each generation of cards, without a card.

python -m benchmarks.gpu.resources

Each kernel is compiled as its launch on a card would compile it, and ptxas reports what the machine code takes. Spills
are bytes that a thread stores to and loads from local memory; warps are how many of them one multiprocessor can hold at
once, of 64, with these registers and this shared memory.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recurra.ops._toolkit.triton import ChunkTiles, Tiles, WalkTiles, default_tiles, trying
from recurra.ops.cells import _gru_triton as gru_triton
from recurra.ops.delta_rule import _triton as delta_kernels
from recurra.ops.delta_rule import _triton_chunk as delta_chunk
from recurra.ops.gate_loop import _triton as fused_kernels
from recurra.ops.gate_loop import _triton_chunk as triton_chunk
from recurra.ops.gate_loop import _triton_chunk_backward as triton_chunk_backward
from recurra.ops.scan import _triton as scan_kernels
from recurra.ops.selective_scan import _triton as selective_kernels

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
REGISTERS, WARPS = 65_536, 64
SHARED = {80: 164 * 1024, 90: 228 * 1024}
"""Bytes of a multiprocessor."""
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def compiled_launch(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, target: int) -> Any:
    """Compile a kernel as a launch with these arguments would on a card of this compute capability."""
    given = dict(zip(kernel.arg_names, arguments)) | constants
    if list(given) != kernel.arg_names:
        raise TypeError(f"{kernel.fn.__name__} was given {list(given)}; expected {kernel.arg_names}, in this order")
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, value) in enumerate(given.items()):
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif name in constants or value == 1:
            signature[name], constexprs[(i,)] = "constexpr", value
        else:
            signature[name] = "i32"
            attributes[(i,)] = [["tt.divisibility", 16]] if value % 16 == 0 else []
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})


@contextmanager
def compiled(target: int) -> Iterator[dict[str, dict[str, int]]]:
    """Make launches compile for a compute capability instead of running; collect what each kernel takes."""
    found: dict[str, dict[str, int]] = {}

    def compile_call(kernel: Any, *arguments: Any, grid: Any, warmup: bool, num_warps: int, **constants: Any) -> None:
        made = compiled_launch(kernel, arguments, constants, num_warps, target)
        found[kernel.fn.__name__] = report(made.asm["ptx"], target) | {
            "shared": made.metadata.shared,
            "warps": num_warps,
        }

    with patch.object(triton.JITFunction, "run", compile_call):
        yield found


def report(ptx: str, target: int) -> dict[str, int]:
    """Read what ptxas says of a kernel's registers and spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"sm_{target}a" if target == 90 else f"sm_{target}"
        command = [str(PTXAS), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return parsed(said)


def parsed(said: str) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills, from ptxas's report."""
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    if not (spilled and registers):
        raise ValueError(f"no report of registers in {said!r}")
    return {"registers": int(registers[1]), "stores": int(spilled[1]), "loads": int(spilled[2])}


def resident_warps(found: dict[str, int], target: int) -> int:
    """How many warps of a kernel fit on a multiprocessor at once; registers are handed out to a warp by 256."""
    by_registers = REGISTERS // (-(-found["registers"] * 32 // 256) * 256) // found["warps"]
    by_shared = SHARED[target] // (found["shared"] + 1024)
    return min(by_registers, by_shared, 32, WARPS // found["warps"]) * found["warps"]


def scan(is_complex: bool) -> None:
    dtype = torch.complex64 if is_complex else torch.float32
    a, h0 = torch.zeros(1, 4096, 256, dtype=dtype), torch.zeros(1, 256, dtype=dtype)
    scan_kernels.scan_into(a, a, a, h0, False)
    scan_kernels.scan_backward_into(a, a, h0, a, a, a, h0, True)


def fused(number: torch.dtype, is_complex: bool) -> None:
    q, a = torch.zeros(1, 4096, 256, dtype=number), torch.zeros(1, 4096, 256)
    x0 = torch.zeros(1, 256)
    a_im, x0_im = (a, x0) if is_complex else (None, None)
    fused_kernels.forward_into(q, a, a, q, q, q, a, a_im, x0, x0_im)
    gradients = [q, q, q, a, a, x0, x0] if is_complex else [q, q, q, a, x0]
    fused_kernels.backward_into(gradients, q, q, q, q, a, a_im, a, a, x0, x0_im, a, a_im)


def chunk(number: torch.dtype, is_complex: bool, per_channel: bool, d: int = 64) -> None:
    q = torch.zeros(1, 4096, 8, d, dtype=number)
    plane = torch.complex64 if is_complex else torch.float32
    a, state = torch.zeros(1, 4096, 8, d if per_channel else 1, dtype=plane), torch.zeros(1, 8, d, d, dtype=plane)
    y = q.to(plane) if is_complex else q
    triton_chunk.forward_into(y, state, q, q, q, a, state)
    triton_chunk_backward.backward_into((q, q, q, a, state), y, state, q, q, q, a, state)


def gru(number: torch.dtype) -> None:
    projected, h = torch.zeros(32, 70, 1140, dtype=number), torch.zeros(32, 380)
    weights = torch.zeros(760, 380, dtype=number), torch.zeros(380, 380, dtype=number)
    steps = gru_triton.forward(projected, h, *weights)
    gru_triton.backward(steps, *weights, torch.zeros(32, 70, 380), h)


def selective(number: torch.dtype, modes: int) -> None:
    x, b = (torch.zeros(1, 4096, d, dtype=number) for d in (256, modes))
    a, h, shares = torch.zeros(modes, 256), torch.zeros(1, modes, 256), torch.zeros(8, 1, 4096, modes)
    selective_kernels.forward_into(x, h, h, x, x, a, b, b)
    selective_kernels.backward_into(h, x, x, h, shares, shares, x, x, x, a, b, b, h)


def delta(d: int, per_channel: bool = False) -> None:
    q, b, state = torch.zeros(1, 4096, 8, d), torch.zeros(1, 4096, 8, 1), torch.zeros(1, 8, d, d)
    a = q if per_channel else b
    delta_kernels.forward_into(q, state, q, state, 32, q, q, q, a, b, state)
    delta_kernels.backward_into((q, q, q, a, b, state), 32, q, state, q, q, a, b, q, state)


def delta_in_chunks(d: int, per_channel: bool, is_backward: bool) -> None:
    """What differs from GateLoop in chunks, whose kernels do the rest."""
    q, b, state = torch.zeros(1, 4096, 8, d), torch.zeros(1, 4096, 8, 1), torch.zeros(1, 8, d, d)
    delta_chunk.solve(q, q, q, q if per_channel else b, b, state, is_backward=is_backward)


f32, bf16 = torch.float32, torch.bfloat16
CASES: dict[str, tuple[str, bool, Callable[[], None]]] = {
    "scan, float32": ("scan", False, lambda: scan(False)),
    "scan, complex64": ("scan", True, lambda: scan(True)),
    "fused, bfloat16": ("fused", False, lambda: fused(bf16, False)),
    "fused, float32, complex gates": ("fused", True, lambda: fused(f32, True)),
    "chunk of 64, bfloat16, a gate a head": ("chunk", False, lambda: chunk(bf16, False, False)),
    "chunk of 64, bfloat16, a gate a channel": ("chunk", False, lambda: chunk(bf16, False, True)),
    "chunk of 64, float32, a gate a head": ("chunk", False, lambda: chunk(f32, False, False)),
    "chunk of 64, float32, complex gate a head": ("chunk", True, lambda: chunk(f32, True, False)),
    "chunk of 64, float32, complex gate a channel": ("chunk", True, lambda: chunk(f32, True, True)),
    "chunk of 128, bfloat16, a gate a head": ("chunk", False, lambda: chunk(bf16, False, False, 128)),
    # these have no tiles in the table
    "selective scan of 16 modes, float32": ("selective", False, lambda: selective(f32, 16)),
    "selective scan of 16 modes, bfloat16": ("selective", False, lambda: selective(bf16, 16)),
    "selective scan of 128 modes, float32": ("selective", False, lambda: selective(f32, 128)),
    "delta rule of 64, float32": ("delta", False, lambda: delta(64)),
    "delta rule of 64 by channel, float32": ("delta", False, lambda: delta(64, True)),
    "delta rule of 128, float32": ("delta", False, lambda: delta(128)),
    "delta rule of 256, float32": ("delta", False, lambda: delta(256)),
    "delta rule of 256 by channel, float32": ("delta", False, lambda: delta(256, True)),
    "delta rule of 64 in chunks": ("delta", False, lambda: delta_in_chunks(64, False, False)),
    "delta rule of 64 in chunks, backward": ("delta", False, lambda: delta_in_chunks(64, False, True)),
    "delta rule of 128 in chunks, by channel": ("delta", False, lambda: delta_in_chunks(128, True, False)),
    "delta rule of 128 in chunks, by channel, backward": ("delta", False, lambda: delta_in_chunks(128, True, True)),
    "steps of a GRU, float32": ("gru", False, lambda: gru(f32)),
    "steps of a GRU, bfloat16": ("gru", False, lambda: gru(bf16)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", type=int, choices=SHARED, default=list(SHARED))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--with", dest="sizes", type=json.loads, default={}, help='other sizes: {"warps": 8}')
    arguments = parser.parse_args()
    table = Table("kernel", *(f"sm_{target}: {word}" for target in arguments.targets for word in WORDS))
    for case in arguments.only:
        kernel, is_complex, launch = CASES[case]
        tiles: Tiles = default_tiles(kernel, is_complex)
        kind = ChunkTiles if kernel == "chunk" else WalkTiles
        rows: dict[str, list[str]] = {}
        for target in arguments.targets:
            with compiled(target) as found, trying(kernel, kind(**{**vars(tiles), **arguments.sizes})):
                launch()
            for name, one in found.items():
                spills = f"{one['stores']}/{one['loads']}"
                cells = [str(one["registers"]), spills, f"{one['shared']:,}", str(resident_warps(one, target))]
                rows.setdefault(name, []).extend(cells)
        table.add_row(case, *[""] * (len(WORDS) * len(arguments.targets)))
        for name, cells in rows.items():
            table.add_row(f"  {name}", *cells)
    Console(width=140).print(table)


WORDS = ("registers", "spills", "shared", "warps")

if __name__ == "__main__":
    main()
