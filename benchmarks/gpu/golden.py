"""Equality with the CPU: every Triton kernel and every mixer's model on the card, beside float64 on the CPU.

python -m benchmarks.gpu.golden

The shapes are the corners of the kernels: one step, odd sizes, many short and few long sequences, time cut into chunks,
every kind of gates. Exit status 1 if any differs by more than its rounding.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.card import arguments, distance, little_blocks, machine, of_part, place, write
from recurra import delta_rule, gate_loop, linear_scan, list_mixers
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.ops.cells.gru import GRUCell, RecurrentWeights, gru_sequence, gru_sequence_reference
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part
from recurra.ops.selective_scan import selective_scan

SHAPES = ((1, 1, 1), (2, 33, 5), (3, 1000, 65), (1, 65_537, 3), (64, 128, 512))
HEADS = ((1, 1, 1, 16), (2, 65, 3, 32), (2, 1024, 4, 64), (1, 300, 2, 128))
GRUS = ((1, 1, 5), (17, 33, 130), (32, 70, 380))
MODES = ((1, 1, 1, 1), (2, 33, 5, 3), (3, 1000, 65, 16), (1, 4097, 3, 128), (8, 256, 512, 16))
DRY_SHAPES, DRY_HEADS = ((1, 1, 1), (2, 5, 3)), ((1, 5, 1, 16),)
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
OF_MODELS = 2e-3
"""Logits and gradients of a whole model in float32, over their largest number."""
WHOLE = "0/1"
"""The part that is everything."""

Result = dict[str, object]
Work = Callable[[], Result]


def outputs_and_gradients(call: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = call(*leaves)
    return [y, *torch.autograd.grad(y, leaves, weights.to(y.device, y.dtype))]


def compared(
    name: str, call: Callable[..., Tensor], right: Callable[..., Tensor], inputs: list[Tensor], device: torch.device,
    tolerance: float,
) -> Result:  # fmt: skip
    """Compare `call` on the device with `right` in float64 on the CPU, both from the same rounded inputs."""
    wide = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in inputs]
    try:
        weights = torch.randn_like(right(*wide))
        expected = outputs_and_gradients(right, wide, weights)
        actual = outputs_and_gradients(call, [x.to(device) for x in inputs], weights)
        # a gradient that sums many terms may lose a digit
        distances = [distance(mine, other) for mine, other in zip(actual, expected, strict=True)]
        equal = distances[0] <= tolerance and all(one <= 10 * tolerance for one in distances)
        return {"name": name, "equal": equal, "distances": distances}
    except Exception as error:
        return {"name": name, "equal": False, "error": f"{type(error).__name__}: {str(error)[:500]}"}


def gates(shape: tuple[int, ...], is_complex: bool) -> Tensor:
    magnitude = torch.sigmoid(3 + torch.randn(shape))
    return torch.polar(magnitude, torch.randn(shape)) if is_complex else magnitude


def scans(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    for shape in shapes:
        for is_complex in (False, True):
            b = torch.randn(shape, dtype=torch.complex64 if is_complex else torch.float32)
            yield partial(
                compared, f"linear_scan {shape} {'complex64' if is_complex else 'float32'}",
                lambda a, b: linear_scan(a, b, backend="triton"), linear_scan,
                [gates(shape, is_complex), b], device, ROUNDING[torch.float32],
            )  # fmt: skip


def fused(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    def call(q: Tensor, k: Tensor, v: Tensor, *planes: Tensor) -> Tensor:
        kind = planes[0].dtype.to_complex() if len(planes) > 1 else planes[0].dtype
        state = torch.zeros(len(q), q.shape[2], 1, 1, dtype=kind, device=q.device)
        both = Planes(planes[0], planes[1] if len(planes) > 1 else None)
        return gate_loop_real_part(q, k, v, both, state=state, backend="triton")[0]

    def right(q: Tensor, k: Tensor, v: Tensor, *planes: Tensor) -> Tensor:
        a = torch.complex(*planes) if len(planes) > 1 else planes[0]
        return gate_loop(q, k, v, a, mode="scan")[0].real

    for shape in shapes:
        for number in (torch.float32, torch.bfloat16):
            for is_complex in (False, True):
                a = gates((*shape, 1), is_complex)
                planes = [a.real.clone(), a.imag.clone()] if is_complex else [a]
                inputs = [*torch.randn(3, *shape, 1).to(number), *planes]
                name = f"fused {shape} {number}, {'complex' if is_complex else 'real'} gates"
                yield partial(compared, name, call, right, inputs, device, ROUNDING[number])


def chunks(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    for shape in shapes:
        for number in (torch.float32, torch.bfloat16):
            for per_channel in (False, True):
                for is_complex in (False, True):
                    if is_complex and shape[-1] > 64:
                        continue  # more than the kernels take
                    a = gates((*shape[:3], shape[3] if per_channel else 1), is_complex)
                    inputs = [*torch.randn(3, *shape).to(number), a]
                    kind = f"{'complex' if is_complex else 'real'} gate a {'channel' if per_channel else 'head'}"
                    yield partial(
                        compared, f"chunk {shape} {number}, {kind}",
                        lambda *x: gate_loop(*x, mode="chunk", backend="triton")[0],
                        lambda *x: gate_loop(*x, mode="chunk")[0], inputs, device, ROUNDING[number],
                    )  # fmt: skip


def joined(results: tuple[Tensor, Tensor]) -> Tensor:
    """The outputs and the last state in one."""
    y, last = results
    return torch.cat([y.flatten().to(last.dtype), last.flatten()])


def selective(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    for batch, length, row, modes in shapes:
        for number in (torch.float32, torch.bfloat16):
            x, step = torch.randn(2, batch, length, row).to(number)
            b, c = torch.randn(2, batch, length, modes).to(number)
            inputs = [x, step.exp(), -torch.randn(row, modes).exp(), b, c, torch.randn(batch, modes, row)]
            yield partial(
                compared, f"selective_scan {(batch, length, row, modes)} {number}",
                lambda *x: joined(selective_scan(*x, backend="triton")), lambda *x: joined(selective_scan(*x)),
                inputs, device, ROUNDING[number],
            )  # fmt: skip


def deltas(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    for batch, length, heads, d in shapes:
        for mode, d_a in product(("fused", "chunk"), (1, d)):
            q, k, v = torch.randn(3, batch, length, heads, d)
            inputs = [q, functional.normalize(k, dim=-1), v, gates((batch, length, heads, d_a), False)]
            inputs += [2 * torch.rand(batch, length, heads, 1), torch.randn(batch, heads, d, d)]
            yield partial(
                compared, f"delta_rule {(batch, length, heads, d)}, {mode}, {d_a} decays a head",
                lambda *x, mode=mode: joined(delta_rule(*x, mode=mode, backend="triton")),
                lambda *x: joined(delta_rule(*x)), inputs, device, ROUNDING[torch.float32],
            )  # fmt: skip


def grus(sizes: tuple[tuple[int, ...], ...], device: torch.device) -> Iterator[Work]:
    for batch, length, size in sizes:

        def call(function: Callable[..., tuple[Tensor, Tensor]], *x: Tensor) -> Tensor:
            return function(GRUCell(1, x[1].shape[1]), *x[:2], RecurrentWeights(*x[2:]))[0]

        scale = size**-0.5
        inputs = [torch.randn(batch, length, 3 * size), torch.randn(batch, size)]
        inputs += [torch.randn(2 * size, size) * scale, torch.randn(size, size) * scale]
        name = f"steps of a GRU {(batch, length, size)}"
        work = partial(call, gru_sequence), partial(call, gru_sequence_reference)
        yield partial(compared, name, *work, inputs, device, ROUNDING[torch.float32])


def model_of(name: str, length: int, device: torch.device) -> Result:
    """Compare a language model with a mixer: its logits, in one piece and in two, and its gradients."""
    torch.manual_seed(1)
    found = []
    try:
        config = LanguageModelConfig(50, None, 2, 64, 128, mixer=name)
        state, tokens = LanguageModel(config).state_dict(), torch.randint(50, (2, length))
        for where, number in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
            model = LanguageModel(config).eval()
            model.load_state_dict(state)
            model, moved = model.to(where, number), tokens.to(where)
            logits, _ = model(moved)
            first, carried = model(moved[:, : length // 3])
            second, _ = model(moved[:, length // 3 :], carried)
            (logits * torch.linspace(-1, 1, 50, device=where, dtype=number)).sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([logits, torch.cat([first, second], 1), *gradients])
        distances = [distance(mine, right) for mine, right in zip(*found, strict=True)]
        return {"name": f"model with {name}", "equal": max(distances) <= OF_MODELS, "distances": distances[:2]}
    except Exception as error:
        return {"name": f"model with {name}", "equal": False, "error": f"{type(error).__name__}: {str(error)[:500]}"}


def models(length: int, names: list[str], device: torch.device) -> Iterator[Work]:
    return (partial(model_of, name, length, device) for name in names)


def all_work(device: torch.device, dry: bool) -> Iterator[Work]:
    shapes, heads = (DRY_SHAPES, DRY_HEADS) if dry else (SHAPES, HEADS)
    mixers, length = (["gateloop", "gru"], 9) if dry else (list_mixers(), 200)
    yield from deltas(heads, device)
    yield from selective(((2, 5, 3, 2),) if dry else MODES, device)
    yield from scans(shapes, device)
    yield from fused(shapes, device)
    yield from chunks(heads, device)
    yield from grus(((2, 3, 5),) if dry else GRUS, device)
    yield from models(length, mixers, device)


def one_part(given: argparse.Namespace, device: torch.device) -> list[Result]:
    """Do the work of a part, and write what is found as it comes."""
    found: list[Result] = []
    with little_blocks(given.dry):
        for number, work in enumerate(all_work(device, given.dry)):
            if of_part(number, given.part):
                found.append(work())
                write(given.out, {"machine": machine(device), "results": found})
    return found


def in_parts(given: argparse.Namespace) -> list[Result]:
    """Let processes do a part each; a part that does not come to its end counts as one that differs."""
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(given.jobs)]
        dry = ["--dry"] if given.dry else []
        processes = []
        for part, file in enumerate(files):
            command = [sys.executable, "-m", "benchmarks.gpu.golden", *dry, "--out", str(file)]
            processes.append(subprocess.Popen([*command, "--part", f"{part}/{given.jobs}"]))
        while True:
            running = any(process.poll() is None for process in processes)
            parts = [json.loads(file.read_text()) for file in files if file.exists()]
            found = [result for part in parts for result in part["results"]]
            for part, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    found.append({"name": f"part {part}", "equal": False, "error": f"status {process.poll()}"})
            write(given.out, {"machine": parts[0]["machine"] if parts else {}, "results": found})
            if not running:
                return found
            time.sleep(0.5)


def main(words: list[str] | None = None) -> int:
    parser = arguments(__doc__, "equality.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes, since compiling takes most of the time")
    parser.add_argument("--part", default=WHOLE, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    found = in_parts(given) if given.jobs > 1 else one_part(given, place(given.dry))
    for result in found:
        if not result["equal"]:
            print(f"DIFFERENT: {result}", file=sys.stderr, flush=True)
    n_equal = sum(bool(result["equal"]) for result in found)
    print(f"{n_equal} of {len(found)} are equal to the CPU's float64 but for their rounding")
    if given.part != WHOLE:
        return 0  # any other status means that it has not come to its end
    return int(n_equal < len(found) or not found)


if __name__ == "__main__":
    raise SystemExit(main())
