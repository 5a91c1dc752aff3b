"""Find the tiles, chunk lengths, warps and stages of the Triton kernels on this card, and write them to a table.

python -m benchmarks.gpu.tuning --seconds 120
python -m benchmarks.gpu.tuning --adopt runs/gpu/tiles.json

A search starts from the sizes that the kernels take on this card already. One size is changed at a time, and kept if
forward and backward together take at least 3% less time. What is wrong or does not compile is left out. The result has
what is better than the start, in the form of the table that the kernels read
(`src/recurra/ops/_toolkit/triton.py.json`); until it is adopted there, RECURRA_TILES=FILE makes them read it too.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.card import (
    LITTLE,
    arguments,
    capability,
    card_name,
    distance,
    forward_backward,
    machine,
    of_part,
    place,
    timed,
    write,
)
from benchmarks.timing import median_ratio
from recurra import gate_loop, linear_scan
from recurra.ops._toolkit.triton import (
    FORMAT,
    TABLE,
    ChunkTiles,
    Tiles,
    WalkTiles,
    merged,
    number_key,
    read_table,
    tiles_for,
    trying,
    with_entry,
)
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part

CHOICES: dict[type, dict[str, tuple[int, ...]]] = {
    WalkTiles: {
        "channels": (64, 128, 256, 32),
        "channels_per_warp": (32, 64, 128),
        "stages": (2, 3, 4, 6),
        "lanes": (512, 1024, 2048, 4096),
        "shortest_chunk": (16, 32, 64, 128),
    },
    ChunkTiles: {
        "key_tile": (16, 32, 64),
        "key_warps": (2, 4, 8),
        "warps": (2, 4, 8),
        "tile": (16, 32, 64),
        "span": (32, 64, 128, 256),
        "block": (16, 32),
    },
}
GAIN = 0.97
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A kernel for a type of numbers, and the shapes that count."""

    kernel: str
    number: torch.dtype
    is_complex: bool
    shapes: tuple[Shape, ...]

    @property
    def key(self) -> str:
        return number_key(self.number, self.is_complex)

    def calls(self, device: torch.device) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
        """Forward and backward passes over the shapes."""
        for shape in self.shapes:
            yield forward_backward(*self._call(shape, device))

    def _call(self, shape: Shape, device: torch.device) -> tuple[Callable[..., Tensor], list[Tensor]]:
        if self.kernel == "chunk":
            *steps, d, per_channel = shape
            q, k, v = torch.randn(3, *steps, d, device=device).to(self.number)
            a = self._gates((*steps, d if per_channel else 1), device)
            return (lambda *x: gate_loop(*x, mode="chunk", backend="triton")[0]), [q, k, v, a]
        a = self._gates(shape, device)
        if self.kernel == "scan":
            return (lambda a, b: linear_scan(a, b, backend="triton")), [
                a,
                torch.randn(shape, device=device).to(a.dtype),
            ]
        q, k, v = torch.randn(3, *shape, 1, device=device).to(self.number)
        planes = [a.real.clone(), a.imag.clone()] if self.is_complex else [a]

        def fused(q: Tensor, k: Tensor, v: Tensor, *a: Tensor) -> Tensor:
            state = torch.zeros(len(q), q.shape[2], 1, 1, device=device)
            state = state.to(torch.complex64) if len(a) > 1 else state
            both = Planes(a[0], a[1] if len(a) > 1 else None)
            return gate_loop_real_part(q, k, v, both, state=state, backend="triton")[0]

        return fused, [q, k, v, *(x.unsqueeze(-1) for x in planes)]

    def _gates(self, shape: Shape, device: torch.device) -> Tensor:
        magnitude = torch.sigmoid(3 + torch.randn(shape, device=device))
        return torch.polar(magnitude, torch.randn_like(magnitude)) if self.is_complex else magnitude


WIDE, NARROW = (8, 4096, 1024), (1, 65_536, 64)
HEADS = ((4, 4096, 8, 64, 0), (4, 4096, 8, 64, 1))
TASKS = [
    Task("fused", torch.float32, True, (WIDE, NARROW, (32, 1024, 64))),
    Task("scan", torch.float32, False, (WIDE, NARROW)),
    Task("chunk", torch.bfloat16, False, HEADS),
    Task("chunk", torch.float32, False, HEADS),
    Task("fused", torch.bfloat16, True, (WIDE, NARROW, (32, 1024, 64))),
    Task("scan", torch.float32, True, (WIDE, NARROW)),
    Task("chunk", torch.float32, True, HEADS),
    Task("chunk", torch.bfloat16, True, HEADS),
    Task("fused", torch.float32, False, (WIDE, NARROW)),
    Task("fused", torch.bfloat16, False, (WIDE, NARROW)),
]
DRY = [Task("scan", torch.float32, False, ((1, 9, 5),)), Task("chunk", torch.float32, False, ((1, 6, 1, 16, 0),))]


def start_of(task: Task, device: torch.device) -> Tiles:
    """The sizes that the kernels take on the device before a search; in the interpreter, chunks of two short blocks."""
    interpreted = device.type == "cpu" and task.kernel == "chunk"
    return LITTLE if interpreted else tiles_for(task.kernel, task.number, task.is_complex, device)


@dataclass
class Search:
    """A search over one task's sizes from its start; `best` so far, and what was tried."""

    task: Task
    device: torch.device
    rounds: int
    ends: float
    start: Tiles = field(init=False)
    best: Tiles = field(init=False)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.best = start_of(self.task, self.device)

    def run(self, choices: dict[str, tuple[int, ...]]) -> Tiles:
        """Change one size after the other; a second pass tries again what depends on the others."""
        calls = list(self.task.calls(self.device))
        with trying(self.task.kernel, self.best):
            right = [call() for call in calls]
        for name, values in [*choices.items()] * 2:
            for value in values:
                if time.monotonic() > self.ends:
                    return self.best
                self._try(name, value, calls, right)
        return self.best

    def _try(self, name: str, value: int, calls: list, right: list) -> None:
        try:
            tiles = replace(self.best, **{name: value})
        except ValueError:  # sizes that do not go together
            return
        if tiles in (self.start, self.best) or any(one["tiles"] == asdict(tiles) for one in self.tried):
            return
        found: dict[str, Any] = {"kernel": self.task.kernel, "key": self.task.key, "tiles": asdict(tiles)}
        try:
            found["ratio"] = self._ratio(tiles, calls, right)
        except Exception as error:  # of the compiler, or out of registers or shared memory
            found["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        self.tried.append(found)
        if found.get("ratio", 1.0) < GAIN:
            self.best = tiles

    def _ratio(self, tiles: Tiles, calls: list, right: list) -> float:
        """The time of `tiles` over that of the best, in turn: the geometric mean over the shapes."""
        best, logarithms = self.best, []

        def under(tiles: Tiles, call: Callable[[], object]) -> Callable[[], object]:
            def run() -> object:
                with trying(self.task.kernel, tiles):
                    return call()

            return run

        for call, expected in zip(calls, right, strict=True):
            actual: Any = under(tiles, call)()
            worst = max(distance(mine, other) for mine, other in zip(actual, expected, strict=True))
            if not worst <= TOLERANCES[self.task.number]:
                raise ValueError(f"another result, by {worst:.1e}")
            pair = {"new": under(tiles, call), "best": under(best, call)}
            seconds = timed(pair, self.rounds, self.device, warm_up=1)
            logarithms.append(math.log(median_ratio(seconds["new"], seconds["best"])))
        return math.exp(sum(logarithms) / len(logarithms))


def candidates(start: Tiles) -> Iterator[Tiles]:
    """The start of a search, and the sizes that differ from it in one place."""
    yield start
    for name, values in CHOICES[type(start)].items():
        for value in values:
            with suppress(ValueError):
                if (tiles := replace(start, **{name: value})) != start:
                    yield tiles


def compile_part(tasks: list[Task], part: str, device: torch.device) -> None:
    """Compile a part of the candidates into Triton's cache on disk, by calls on one short sequence."""
    work = [(task, tiles) for task in tasks for tiles in candidates(start_of(task, device))]
    for number, (task, tiles) in enumerate(work):
        if of_part(number, part):
            short = replace(task, shapes=tuple((1, *shape[1:]) for shape in task.shapes))
            with suppress(Exception), trying(task.kernel, tiles):  # the search will say what fails
                for call in short.calls(device):
                    call()


def compile_in_parts(jobs: int, seconds: float, dry: bool) -> None:
    """Compile all candidates, a process each part, for at most this long."""
    ends = time.monotonic() + seconds
    command = [sys.executable, "-m", "benchmarks.gpu.tuning", *(["--dry"] if dry else []), "--part"]
    processes = [subprocess.Popen([*command, f"{part}/{jobs}"]) for part in range(jobs)]
    for process in processes:
        try:
            process.wait(max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def adopt(found: Path, table: Path = TABLE) -> None:
    """Put the entries of a result into the package's table, over older ones of the same card and kernel."""
    both = merged(read_table(table), read_table(found))
    text = json.dumps({"format": FORMAT, "devices": both}, indent=1, sort_keys=True)
    table.write_text(text + "\n")


def main(words: list[str] | None = None) -> None:
    parser = arguments(__doc__, "tiles.json", rounds=7)
    parser.add_argument("--seconds", type=float, default=120, help="for all kernels together (default: 120)")
    parser.add_argument("--adopt", type=Path, metavar="FILE", help="put a result into the package's table, and end")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile the candidates before the search")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.adopt:
        adopt(given.adopt)
        return
    device, tasks = place(given.dry), DRY if given.dry else TASKS
    if given.part:
        compile_part(tasks, given.part, device)
        return
    ends, table, tried = time.monotonic() + given.seconds, {}, []
    if given.jobs > 1:
        compile_in_parts(given.jobs, given.seconds / 2, given.dry)
    for number, task in enumerate(tasks):
        now = time.monotonic()
        if now > ends:
            break
        # what a search leaves over goes to those after it
        search = Search(task, device, given.rounds, now + (ends - now) / (len(tasks) - number) * 1.5)
        choices = CHOICES[type(search.best)]
        if given.dry:
            choices = {name: values[:2] for name, values in [*choices.items()][:2]}
        try:
            best = search.run(choices)
        except Exception as error:
            print(f"{task.kernel} {task.key}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(f"{task.kernel} {task.key}: {best}, of {len(search.tried)} others", flush=True)
        tried += search.tried
        if best != search.start:
            table = dict(with_entry(table, card_name(device), capability(device), task.kernel, task.key, best))
        write(given.out, {"format": FORMAT, "devices": table, "machine": machine(device), "tried": tried})


if __name__ == "__main__":
    main()
