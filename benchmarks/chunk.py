"""GateLoop with heads, forward and backward: chunks beside the delta rule, the scan, a loop and softmax attention.

python -m benchmarks.chunk                    # (4, 4096, 8, 64), some minutes and 10 GB for scan and loop
python -m benchmarks.chunk --only chunk sdpa  # the two quick ones
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from benchmarks.table import Row, megabytes, save, show
from benchmarks.timing import interleaved, median_ratio
from recurra import delta_rule, gate_loop
from recurra._process import keep_large_blocks

NAMES = (
    *("chunk", "chunk, vector gate", "chunk, complex gate", "delta rule", "delta rule, chunk"),
    *("sdpa", "scan", "recurrent"),
)
SLOW = ("scan", "recurrent")


def _inputs(batch: int, length: int, heads: int, d: int, gate: str) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, length, heads, d)
    a = torch.sigmoid(3 + torch.randn(batch, length, heads, d if gate == "vector" else 1))
    if gate == "complex":
        a = torch.polar(a, torch.randn_like(a))
    return [x.requires_grad_() for x in (q, k, v, a)]


def _call(name: str, shape: tuple[int, int, int, int]) -> Callable[[], object]:
    """Forward and backward of a way to mix."""
    inputs = _inputs(*shape, gate="vector" if "vector" in name else "complex" if "complex" in name else "scalar")

    def mix() -> tuple[Tensor, list[Tensor]]:
        if name == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in inputs[:3])
            return scaled_dot_product_attention(q, k, v, is_causal=True), inputs[:3]
        if name.startswith("delta rule"):
            q, k, v, a = inputs
            mode = name.partition(", ")[2] or "auto"
            return delta_rule(q, normalize(k, dim=-1), v, a, torch.full_like(a, 0.5), mode=mode)[0], inputs
        return gate_loop(*inputs, mode=name.partition(",")[0])[0], inputs

    def call() -> object:
        y, reached = mix()
        return torch.autograd.grad(y, reached, torch.ones_like(y))

    return call


def _megabytes(arguments: argparse.Namespace, name: str) -> float:
    """The peak memory of a process that does nothing else, less what it had before its first call."""
    command = [sys.executable, "-m", "benchmarks.chunk", "--shape", *map(str, arguments.shape), "--memory", name]
    command += ["--threads", str(arguments.threads)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=[4, 4096, 8, 64], metavar=("B", "L", "H", "d"))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--memory", choices=NAMES, help="print the peak memory of one, in MB")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of the quick ones (default: 7); 1 of others")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    shape = tuple(arguments.shape)
    if arguments.memory:
        call = _call(arguments.memory, shape)
        before = megabytes("VmHWM")  # getrusage would count the parent's, from before the exec
        call()
        print(json.dumps(megabytes("VmHWM") - before))
        return
    quick = [name for name in arguments.only if name not in SLOW]
    seconds = interleaved({name: _call(name, shape) for name in quick}, rounds=arguments.rounds)
    for name in set(SLOW) & set(arguments.only):
        seconds |= interleaved({name: _call(name, shape)}, rounds=1)
    rows = []
    for name in arguments.only:
        what = f"{shape}, peak {_megabytes(arguments, name):,.0f} MB"
        floor = seconds["chunk"][: len(seconds[name])] if "chunk" in seconds else seconds[name]
        rows.append(Row(what, name, seconds[name] * (2 if name in SLOW else 1), median_ratio(seconds[name], floor)))
    title = "GateLoop with heads, forward and backward, time over chunk mode's"
    save(Path("runs/benchmarks-chunk.json"), {title: show(title, rows)})


if __name__ == "__main__":
    main()
