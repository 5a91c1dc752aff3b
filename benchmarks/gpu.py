"""On a CUDA card: the scan beside a copy, the fused GateLoop and chunks beside other libraries' kernels.

python -m benchmarks.gpu
python -m benchmarks.gpu --type bfloat16 --only chunks

Others are measured where they are installed: accelerated-scan (its CUDA extension is compiled when it is imported) and
flash-linear-attention or fla-core. All results are compared with a loop over steps in float64 before anything is timed.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.table import Row, save, show
from benchmarks.timing import median_ratio
from recurra import gate_loop, linear_scan

Call = Callable[..., Tensor]
NO_DEVICE = "no CUDA device here: nothing was measured"
SCAN = (8, 4096, 1024)
CHUNKS = (4, 4096, 8, 64)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference from the loop over steps, over its largest number; other libraries multiply float32 as TF32."""


def optional(name: str) -> ModuleType | None:
    """Import a peer; where it cannot be had, say so and why."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as reason:
        print(f"without {name}: {str(reason).splitlines()[0]}", file=sys.stderr)
        return None


def on_card(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call by the card's own clock, in turn, behind five rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 5):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if round_ >= 5:
                seconds[name].append(start.elapsed_time(stop) / 1e3)
    return seconds


def forward_backward(call: Call, inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, gradient)


def kept_if_right(calls: dict[str, Call], inputs: list[Tensor], steps: Call, tolerance: float) -> dict[str, Call]:
    """Those of `calls` that give what `steps` gives in float64 on the first 256 steps of one sequence."""
    few = [x[:1, :256] for x in inputs]  # accelerated-scan takes powers of two
    right = steps(*(x.double() for x in few))
    kept = {}
    for name, call in calls.items():
        error = float((call(*few).double() - right).abs().max() / right.abs().max())
        print(f"{name}: {error:.1e} from the loop over steps", file=sys.stderr)
        if error <= tolerance:
            kept[name] = call
        else:
            print(f"{name} is WRONG by more than {tolerance:g} and is not timed", file=sys.stderr)
    return kept


def rows(what: str, calls: dict[str, Callable[[], object]], floor: str, rounds: int) -> Iterator[Row]:
    seconds = on_card(calls, rounds)
    for name, times in seconds.items():
        yield Row(what, name, times, median_ratio(times, seconds[floor]))


def both_ways(calls: dict[str, Call], inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Every call forward, and forward and backward."""
    forward: dict[str, Callable[[], object]] = {name: lambda f=call: f(*inputs) for name, call in calls.items()}
    return forward | {f"{name}, with gradients": forward_backward(call, inputs) for name, call in calls.items()}


def scans(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """linear_scan and its like over a copy of as many bytes as it reads and writes: 1.0 is the memory's own speed."""
    a, b = torch.rand(SCAN, device="cuda"), torch.randn(SCAN, device="cuda")
    calls: dict[str, Call] = {"linear_scan": linear_scan}
    if warp := optional("accelerated_scan.warp"):
        # its layout is (B, D, L): the transposes are left out of what is timed
        calls["accelerated-scan (D before L)"] = lambda a, b: warp.scan(a.mT.contiguous(), b.mT.contiguous()).mT
    if hgrn := optional("fla.ops.hgrn"):
        calls["fla hgrn (gates as logarithms)"] = lambda a, b: hgrn.fused_recurrent_hgrn(b, a.log())[0]
    kept = kept_if_right(calls, [a, b], lambda a, b: linear_scan(a, b, backend="reference"), TOLERANCES[torch.float32])
    source = torch.empty(3, *SCAN, device="cuda").flatten()
    half = source.numel() // 2  # a copy of n numbers moves 2 n, a scan 3 of its tensors
    timed: dict[str, Callable[[], object]] = {"copy of as many bytes": lambda: source[:half].copy_(source[half:])}
    timed |= both_ways({name: call for name, call in kept.items() if name == "linear_scan"}, [a, b])
    if "accelerated-scan (D before L)" in kept:
        turned = [a.mT.contiguous(), b.mT.contiguous()]
        timed |= both_ways({"accelerated-scan (D before L)": warp.scan}, turned)
    if "fla hgrn (gates as logarithms)" in kept:
        logarithms = [a.log(), b]
        timed |= both_ways(
            {"fla hgrn (gates as logarithms)": lambda g, b: hgrn.fused_recurrent_hgrn(b, g)[0]}, logarithms
        )
    yield from rows(f"{SCAN} float32", timed, "copy of as many bytes", rounds)


def fused(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """The max-headed GateLoop, real and with complex gates, over a copy of what the real one reads and writes."""
    q, k, v = torch.randn(3, *SCAN, 1, device="cuda").to(dtype)
    a = torch.rand(*SCAN, 1, device="cuda")
    calls: dict[str, Call] = {"fused": lambda *x: gate_loop(*x, mode="fused")[0]}
    inputs = [q, k, v, a]
    kept = kept_if_right(calls, inputs, lambda *x: gate_loop(*x, mode="recurrent")[0], TOLERANCES[dtype])
    moved = 4 * q.numel() * q.element_size() + a.numel() * a.element_size()
    source = torch.empty(moved, dtype=torch.uint8, device="cuda")
    half = moved // 2
    timed: dict[str, Callable[[], object]] = {"copy of as many bytes": lambda: source[:half].copy_(source[half:])}
    timed |= both_ways(kept, inputs)
    phased = [q, k, v, torch.polar(a, torch.randn_like(a))]
    timed |= both_ways({"fused, complex gates": lambda *x: gate_loop(*x, mode="fused")[0]} if kept else {}, phased)
    yield from rows(f"{SCAN} {str(dtype).removeprefix('torch.')}", timed, "copy of as many bytes", rounds)


def chunks(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """Mode "chunk" by its kernels, in torch, and by flash-linear-attention, for one gate a head and one per channel."""
    batch, length, heads, d = CHUNKS
    q, k, v = torch.randn(3, *CHUNKS, device="cuda").to(dtype)
    for kind, channels, peer in (("gate a head", 1, "simple_gla"), ("gate a channel", d, "gla")):
        a = torch.sigmoid(3 + torch.randn(batch, length, heads, channels, device="cuda"))
        calls: dict[str, Call] = {
            "chunk": lambda *x: gate_loop(*x, mode="chunk", backend="triton")[0],
            "chunk in torch": lambda *x: gate_loop(*x, mode="chunk", backend="reference")[0],
        }
        timed_inputs = {name: [q, k, v, a] for name in calls}
        if module := optional(f"fla.ops.{peer}"):
            function = getattr(module, f"chunk_{peer}")
            in_logarithms = lambda q, k, v, g, f=function: f(q, k, v, g.squeeze(-1), scale=1.0)[0]  # noqa: E731
            if channels > 1:
                in_logarithms = lambda q, k, v, g, f=function: f(q, k, v, g, scale=1.0)[0]  # noqa: E731
            name = f"fla {peer} (gates as logarithms)"
            calls[name] = lambda q, k, v, a, f=in_logarithms: f(q, k, v, a.log())
            timed_inputs[name] = [q, k, v, a.log()]
        steps: Call = lambda *x: gate_loop(*x, mode="recurrent")[0]  # noqa: E731
        kept = kept_if_right(calls, [q, k, v, a], steps, TOLERANCES[dtype])
        timed: dict[str, Callable[[], object]] = {}
        for name, call in kept.items():
            timed |= both_ways({name: in_logarithms if name.startswith("fla") else call}, timed_inputs[name])
        if "chunk" in kept:
            yield from rows(f"{CHUNKS} {str(dtype).removeprefix('torch.')}, {kind}", timed, "chunk", rounds)


SECTIONS = {"scan": scans, "fused": fused, "chunks": chunks}
TITLES = {
    "scan": "linear scan on the card, time over a copy's",
    "fused": "max-headed GateLoop on the card, time over a copy's",
    "chunks": "GateLoop with heads on the card, time over chunk mode's",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--type", choices=["float32", "bfloat16", "float16"], default="float32", help="of q, k and v")
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each function (default: 31)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    dtype = getattr(torch, arguments.type)
    if dtype == torch.float16 and "fused" in arguments.only:
        print("float16 is computed in float32 by the fused kernels")
    results = {TITLES[name]: show(TITLES[name], SECTIONS[name](dtype, arguments.rounds)) for name in arguments.only}
    save(Path("runs/benchmarks-gpu.json"), results)


if __name__ == "__main__":
    main()
