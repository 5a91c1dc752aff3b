"""On a CUDA card: every operator beside a copy, beside plain torch and beside other libraries' kernels, in GB/s.

python -m benchmarks.gpu
python -m benchmarks.gpu --types bfloat16 --only chunks

Others are measured where they are installed: accelerated-scan (its CUDA extension is compiled when it is imported) and
flash-linear-attention or fla-core. All results are compared with a loop over steps in float64 before anything is timed.
GB/s count the fewest bytes that a call has to move: every input read once and every output written once, and with
gradients what the backward pass reads and writes besides.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.card import (
    Calls,
    arguments,
    copy_of,
    distance,
    forward_backward,
    little_blocks,
    machine,
    place,
    timed,
    write,
)
from benchmarks.table import Row, show
from benchmarks.timing import median_ratio
from recurra import delta_rule, gate_loop, linear_scan
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part
from recurra.ops.selective_scan import selective_scan

Call = Callable[..., Tensor]
COPY = "copy of as many bytes"
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference from the loop over steps, over its largest number; other libraries multiply float32 as TF32."""


class Bench(NamedTuple):
    """Where and how to measure: sizes (B, L, D) and (B, L, H, d), and the steps of a check."""

    device: torch.device
    rounds: int
    scan: tuple[int, int, int] = (8, 4096, 1024)
    chunks: tuple[int, int, int, int] = (4, 4096, 8, 64)
    checked: int = 256  # accelerated-scan takes powers of two


@dataclass
class CardRow(Row):
    """A measured function, with what it has to move."""

    n_bytes: int = 0
    gb_per_second: float = 0.0


def optional(name: str) -> ModuleType | None:
    """Import a peer; where it cannot be had, say so and why."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as reason:
        print(f"without {name}: {(str(reason).splitlines() or [type(reason).__name__])[0]}", file=sys.stderr)
        return None


def kept_if_right(calls: dict[str, Call], few: list[Tensor], steps: Call, tolerance: float) -> dict[str, Call]:
    """Those of `calls` that give what `steps` gives in float64 for a few steps of one sequence."""
    right = steps(*(x.to(torch.complex128 if x.is_complex() else torch.float64) for x in few))
    kept = {}
    for name, call in calls.items():
        try:
            error = distance(call(*few), right)
            forward_backward(call, few)()
        except Exception as reason:  # a peer's, whatever it raises
            print(f"{name} failed and is not timed: {type(reason).__name__}: {reason}", file=sys.stderr)
            continue
        print(f"{name}: {error:.1e} from the loop over steps", file=sys.stderr)
        if error <= tolerance:
            kept[name] = call
        else:
            print(f"{name} is WRONG by more than {tolerance:g} and is not timed", file=sys.stderr)
    return kept


def rows(what: str, calls: Calls, n_bytes: dict[str, int], bench: Bench) -> Iterator[CardRow]:
    """Time calls beside a copy of as many bytes as the first of them moves; nothing if no call was right."""
    if not calls:
        return
    first = next(iter(calls))
    seconds = timed({COPY: copy_of(n_bytes[first], bench.device), **calls}, bench.rounds, bench.device)
    for name, times in seconds.items():
        moved = n_bytes[first] if name == COPY else n_bytes[name]
        rate = moved / median(times) / 1e9
        ratio = median_ratio(times, seconds[COPY])
        yield CardRow(what, f"{name} ({rate:,.0f} GB/s)", times, ratio, n_bytes=moved, gb_per_second=rate)


def both_ways(calls: dict[str, Call], inputs: list[Tensor], forward: int, backward: int) -> tuple[Calls, dict]:
    """Every call forward, and forward and backward, and the bytes of each."""
    made: dict[str, Callable[[], object]] = {}
    n_bytes: dict[str, int] = {}
    for name, call in calls.items():
        made[name], n_bytes[name] = (lambda f=call: f(*inputs)), forward
        both = f"{name}, with gradients"
        made[both], n_bytes[both] = forward_backward(call, inputs), forward + backward
    return made, n_bytes


def _few(inputs: list[Tensor], bench: Bench) -> list[Tensor]:
    return [x[:1, : bench.checked] for x in inputs]


def scans(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """linear_scan, real and complex, and its like."""
    if dtype != torch.float32:
        return
    a, b = torch.rand(bench.scan, device=bench.device), torch.randn(bench.scan, device=bench.device)
    own: dict[str, Call] = {"linear_scan": lambda a, b: linear_scan(a, b, backend="triton")}
    steps: Call = lambda a, b: linear_scan(a, b, backend="reference")  # noqa: E731
    size, what = a.numel() * 4, f"{bench.scan} float32"
    made, n_bytes = both_ways(kept_if_right(own, _few([a, b], bench), steps, 1e-3), [a, b], 3 * size, 5 * size)
    yield from rows(what, made, n_bytes, bench)
    turned = torch.polar(a, torch.randn_like(a)), torch.complex(b, b)
    kept = kept_if_right(own, _few([*turned], bench), steps, 1e-3)
    yield from rows(f"{bench.scan} complex64", *both_ways(kept, [*turned], 6 * size, 10 * size), bench)


def scans_of_others(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """linear_scan beside other libraries' scans. Some compile their kernels on import, which may take minutes."""
    if dtype != torch.float32 or bench.device.type != "cuda":
        return
    a, b = torch.rand(bench.scan, device=bench.device), torch.randn(bench.scan, device=bench.device)
    steps: Call = lambda a, b: linear_scan(a, b, backend="reference")  # noqa: E731
    size = a.numel() * 4
    made, n_bytes = both_ways({"linear_scan": linear_scan}, [a, b], 3 * size, 5 * size)
    for peer, (call, inputs) in _scan_peers(a, b).items():
        few, seen = (_few([a, b], bench), "D before L" in peer)
        checked = [x.mT.contiguous() for x in few] if seen else [few[0].log(), few[1]]
        by_steps: Call = (lambda a, b: steps(a.mT, b.mT).mT) if seen else (lambda g, b: steps(g.exp(), b))
        more = both_ways(kept_if_right({peer: call}, checked, by_steps, 1e-3), inputs, 3 * size, 5 * size)
        made, n_bytes = {**made, **more[0]}, {**n_bytes, **more[1]}
    yield from rows(f"{bench.scan} float32", made, n_bytes, bench)


def _scan_peers(a: Tensor, b: Tensor) -> dict[str, tuple[Call, list[Tensor]]]:
    """Other libraries' scans in the layout that each takes, so that turning it is not timed."""
    peers: dict[str, tuple[Call, list[Tensor]]] = {}
    if warp := optional("accelerated_scan.warp"):
        peers["accelerated-scan (D before L)"] = (warp.scan, [a.mT.contiguous(), b.mT.contiguous()])
    if hgrn := optional("fla.ops.hgrn"):
        call: Call = lambda g, b: hgrn.fused_recurrent_hgrn(b, g)[0]  # noqa: E731
        peers["fla hgrn (gates as logarithms)"] = (call, [a.log(), b])
    return peers


def fused(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """The max-headed GateLoop, with real and with complex gates."""
    q, k, v = torch.randn(3, *bench.scan, 1, device=bench.device).to(dtype)
    a, phase = torch.rand(*bench.scan, 1, device=bench.device), torch.randn(*bench.scan, 1, device=bench.device)
    planes = {"real gates": [a], "complex gates": [a * phase.cos(), a * phase.sin()]}
    for kind, gates in planes.items():

        def call(q: Tensor, k: Tensor, v: Tensor, *a: Tensor) -> Tensor:
            kind = a[0].dtype if len(a) == 1 else a[0].dtype.to_complex()
            state = torch.zeros(len(q), q.shape[2], 1, 1, dtype=kind, device=q.device)
            both = Planes(a[0], a[1] if len(a) > 1 else None)
            return gate_loop_real_part(q, k, v, both, state=state, backend="triton")[0]

        def steps(q: Tensor, k: Tensor, v: Tensor, *a: Tensor) -> Tensor:
            gates = a[0] if len(a) == 1 else torch.complex(*a)
            return gate_loop(q, k, v, gates, mode="recurrent")[0].real

        inputs = [q, k, v, *gates]
        kept = kept_if_right({f"fused, {kind}": call}, _few(inputs, bench), steps, TOLERANCES[dtype])
        number, plane = q.numel() * q.element_size(), len(gates) * a.numel() * 4
        # with gradients, the states are written too; backwards everything is read again, and the gradients are written
        made, n_bytes = both_ways(kept, inputs, 4 * number + plane, 7 * number + 4 * plane)
        if made:
            yield from rows(f"{bench.scan} {_name(dtype)}, {kind}", made, n_bytes, bench)


def chunks(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """Mode "chunk" by its kernels, in torch, and by flash-linear-attention, for every kind of gates."""
    batch, length, heads, d = bench.chunks
    q, k, v = torch.randn(3, *bench.chunks, device=bench.device).to(dtype)
    for per, channels, peer in (("a head", 1, "simple_gla"), ("a channel", d, "gla")):
        for is_complex in (False, True):
            a = torch.sigmoid(3 + torch.randn(batch, length, heads, channels, device=bench.device))
            kind = f"{'complex' if is_complex else 'real'} gate {per}"
            gates = torch.polar(a, torch.randn_like(a)) if is_complex else a
            calls: dict[str, Call] = {
                "chunk": lambda *x: gate_loop(*x, mode="chunk", backend="triton")[0],
                "chunk in torch": lambda *x: gate_loop(*x, mode="chunk", backend="reference")[0],
            }
            steps: Call = lambda *x: gate_loop(*x, mode="recurrent")[0]  # noqa: E731
            inputs, number = [q, k, v, gates], q.numel() * q.element_size()
            gate = gates.numel() * gates.element_size()
            kept = kept_if_right(calls, _few(inputs, bench), steps, TOLERANCES[dtype])
            made, n_bytes = both_ways(kept, inputs, 4 * number + gate, 7 * number + 2 * gate)
            if not is_complex and q.is_cuda and (module := optional(f"fla.ops.{peer}")):
                more = _gla_peer(module, peer, [q, k, v, a], steps, bench)
                made = {**made, **more[0]}
                n_bytes |= dict.fromkeys(more[0], 4 * number + gate) | more[1]
            if made:
                yield from rows(f"{bench.chunks} {_name(dtype)}, {kind}", made, n_bytes, bench)


def _gla_peer(
    module: ModuleType, peer: str, inputs: list[Tensor], steps: Call, bench: Bench
) -> tuple[Calls, dict[str, int]]:
    """flash-linear-attention's chunks, whose gates are logarithms."""
    function = getattr(module, f"chunk_{peer}")
    *qkv, a = inputs
    logarithms = a.log().squeeze(-1) if a.shape[-1] == 1 else a.log()
    call: Call = lambda q, k, v, g: function(q, k, v, g, scale=1.0)[0]  # noqa: E731
    wide: Call = lambda q, k, v, g: steps(q, k, v, (g.unsqueeze(-1) if g.dim() == 3 else g).exp())  # noqa: E731
    name = f"fla {peer} (gates as logarithms)"
    kept = kept_if_right({name: call}, _few([*qkv, logarithms], bench), wide, TOLERANCES[qkv[0].dtype])
    number, gate = qkv[0].numel() * qkv[0].element_size(), a.numel() * a.element_size()
    return both_ways(kept, [*qkv, logarithms], 4 * number + gate, 7 * number + 2 * gate)


def selective(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """Mamba's scan with 16 modes a channel, by its kernels and in torch."""
    batch, length, row = bench.scan
    x, step = torch.randn(2, *bench.scan, device=bench.device)
    b, c = torch.randn(2, batch, length, 16, device=bench.device).to(dtype)

    def by(backend: str) -> Call:
        def call(x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
            kind = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
            a, h0 = -torch.arange(1, 17, **kind).expand(row, 16), torch.zeros(len(x), 16, row, **kind)
            return selective_scan(x, step, a, b, c, h0, backend=backend)[0]

        return call

    inputs = [x.to(dtype), functional.softplus(step - 4).to(dtype), b, c]
    calls = {"selective_scan": by("triton"), "selective_scan in torch": by("reference")}
    kept = kept_if_right(calls, _few(inputs, bench), by("reference"), TOLERANCES[dtype])
    wide, narrow = (t.numel() * t.element_size() for t in (inputs[0], b))
    # the kept states are written and read besides: as many float32 numbers as x has
    made, n_bytes = both_ways(kept, inputs, 3 * wide + 2 * narrow, 5 * wide + 8 * x.numel() + 4 * narrow)
    yield from rows(f"{bench.scan} {_name(dtype)}", made, n_bytes, bench)


def delta(bench: Bench, dtype: torch.dtype) -> Iterator[CardRow]:
    """The gated delta rule by its kernels, step by step and in chunks, in torch, and by flash-linear-attention."""
    q, k, v = torch.randn(3, *bench.chunks, device=bench.device)
    a, b = torch.rand(2, *bench.chunks[:3], device=bench.device)
    calls: dict[str, Call] = {
        "fused": lambda *x: delta_rule(*x, backend="triton")[0],
        "chunk": lambda *x: delta_rule(*x, mode="chunk", backend="triton")[0],
        "chunk in torch": lambda *x: delta_rule(*x, mode="chunk", backend="reference")[0],
    }
    if q.is_cuda and (fla := optional("fla.ops.gated_delta_rule")):
        calls["fla in chunks"] = lambda q, k, v, a, b: fla.chunk_gated_delta_rule(q, k, v, a.log(), b, scale=1.0)[0]
    inputs = [q.to(dtype), functional.normalize(k, dim=-1).to(dtype), v.to(dtype), 0.9 + 0.1 * a, b]
    steps: Call = lambda *x: delta_rule(*x, mode="recurrent")[0]  # noqa: E731
    kept = kept_if_right(calls, _few(inputs, bench), steps, TOLERANCES[dtype])
    number, gate = q.numel() * inputs[0].element_size(), 8 * a.numel()
    yield from rows(
        f"{bench.chunks} {_name(dtype)}", *both_ways(kept, inputs, 4 * number + gate, 7 * number + 2 * gate), bench
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SECTIONS = {
    "selective": selective, "delta": delta, "scan": scans, "fused": fused, "chunks": chunks,
    "scans of others": scans_of_others,
}  # fmt: skip
TITLES = {
    "selective": "selective scan on the card, time over a copy's",
    "delta": "gated delta rule on the card, time over a copy's",
    "scan": "linear scan on the card, time over a copy's",
    "fused": "max-headed GateLoop on the card, time over a copy's",
    "chunks": "GateLoop with heads on the card, time over a copy's",
    "scans of others": "other libraries' scans on the card, time over a copy's",
}


def main(words: list[str] | None = None) -> int:
    parser = arguments(__doc__, "kernels.json")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--types", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    given = parser.parse_args(words)
    device = place(given.dry)
    sizes = {"scan": (1, 4, 8), "chunks": (1, 4, 1, 16), "checked": 4} if given.dry else {}
    bench = Bench(device, given.rounds, **sizes)  # type: ignore[arg-type]
    found: dict[str, object] = {"machine": machine(device)}
    n_failed = 0
    with little_blocks(given.dry):
        for name in given.only:
            for word in given.types:
                title = f"{TITLES[name]}, {word}"
                try:
                    found[title] = [vars(row) for row in show(title, SECTIONS[name](bench, getattr(torch, word)))]
                except Exception as reason:  # the other sections are measured all the same
                    print(f"{title} FAILED: {type(reason).__name__}: {reason}", file=sys.stderr)
                    found[title], n_failed = {"error": f"{type(reason).__name__}: {str(reason)[:500]}"}, n_failed + 1
                write(given.out, found)
    return int(n_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
