"""What the measurements on a card share: where they run, the card's clock, and files of results."""

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import seconds_of
from recurra.ops._toolkit.triton import ChunkTiles, trying

NO_DEVICE = "no CUDA device here: nothing was measured (--dry runs tiny sizes on the CPU)"
AHEAD = 5_000_000
"""Cycles of the card, 2 to 4 ms, in which the host can launch a call before the card's clock starts."""
LITTLE = ChunkTiles(span=8, block=4, tile=16, key_tile=16)
Calls = Mapping[str, Callable[[], object]]


def arguments(doc: str | None, file: str, *, rounds: int = 31) -> argparse.ArgumentParser:
    """Make a parser of what all measurements take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("runs/gpu") / file
    parser.add_argument("--out", type=Path, default=default, help=f"file of results (default: {default})")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed calls of each function (default: {rounds})")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter")
    return parser


def place(dry: bool) -> torch.device:
    """Give the device to measure on, with fixed random numbers.

    Raises:
        SystemExit: there is no CUDA device.
    """
    torch.manual_seed(0)
    if dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(NO_DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # as in a training run
    return torch.device("cuda")


@contextmanager
def little_blocks(dry: bool) -> Iterator[None]:
    """In the interpreter, chunks of two blocks of 4 steps, which a card could not multiply."""
    with trying("chunk", LITTLE) if dry else nullcontext():
        yield


def timed(
    calls: Calls, rounds: int, device: torch.device, warm_up: int = 5, *, with_host: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call by the device's own clock, in turn, behind `warm_up` rounds.

    On a card this is the time of the kernels alone, as in a program that launches ahead of its card: a short call takes
    the host longer to launch than the card to run. With `with_host`, the launches count too.
    """
    if device.type == "cpu":
        rounds, warm_up = min(rounds, 2), 0
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + warm_up):
        for name, call in calls.items():
            taken = _on_card(call, 0 if with_host else AHEAD) if device.type == "cuda" else seconds_of(call)
            if round_ >= warm_up:
                seconds[name].append(taken)
    return seconds


def _on_card(call: Callable[[], object], ahead: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(ahead)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def copy_of(n_bytes: int, device: torch.device) -> Callable[[], object]:
    """A copy within the device that reads and writes `n_bytes` together."""
    source = torch.empty(max(2, n_bytes), dtype=torch.uint8, device=device)
    half = source.numel() // 2
    return lambda: source[:half].copy_(source[half : 2 * half])


def forward_backward(call: Callable[..., Tensor], inputs: Iterable[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A call that computes the output's gradients of all inputs too, for an output gradient of drawn numbers."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, gradient)


def distance(actual: Tensor, right: Tensor) -> float:
    """The largest difference over the largest number of `right`; NaN if there is one."""
    wide = torch.complex128 if right.is_complex() else torch.float64
    actual, right = (x.detach().to(actual.device, wide) for x in (actual, right))  # a card compares faster
    return float((actual - right).abs().max() / right.abs().max().clamp_min(1e-300))


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def capability(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else "0.0"


def machine(device: torch.device) -> dict[str, Any]:
    """What a result was measured on."""
    return {
        "device": card_name(device),
        "capability": capability(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def of_part(number: int, part: str) -> bool:
    """Whether the work of this number is in a part such as "2/8"."""
    own, parts = map(int, part.split("/"))
    return number % parts == own


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write results so far over those before: a stage that is stopped keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1))
    new.replace(path)
