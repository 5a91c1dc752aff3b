"""What it costs to write a large result into new memory: time and page faults of a call.

    python -m benchmarks.new_memory                            # 128 and 256 MB, half a minute
    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.new_memory     # torch asks for huge pages

The calls take turns, each after its result of the time before was given back; medians. POSIX systems only.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recurra.ops.scan.operator import linear_scan

CHANNELS, BYTES = 64, 4


class Cost(NamedTuple):
    """Of one call: what the clock says, what the system took of it (of all threads together), and its page faults."""

    milliseconds: float
    in_the_system: float
    faults: int


def measure(call: Callable[[], Tensor]) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = call()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    del result
    return Cost(seconds * 1e3, (after.ru_stime - before.ru_stime) * 1e3, after.ru_minflt - before.ru_minflt)


@torch.inference_mode()
def compare(length: int, rounds: int) -> dict[str, Cost]:
    """The medians of each call at (1, length, 64), after one that is not counted."""
    a, b = torch.rand(1, length, CHANNELS) * 0.5 + 0.4, torch.randn(1, length, CHANNELS)
    out = torch.zeros_like(b)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear_scan": lambda: linear_scan(a, b),
        "linear_scan(out=)": lambda: linear_scan(a, b, out=out),
        "torch.add": lambda: torch.add(a, b),
        "torch.add(out=)": lambda: torch.add(a, b, out=out),
        "torch.empty, filled": lambda: torch.empty_like(b).fill_(1.0),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            cost = measure(call)
            if turn > 0:
                costs[name].append(cost)
    return {name: Cost(*map(statistics.median, zip(*each))) for name, each in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**19, 2**20], help="(default: 2^19 and 2^20)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
    for length in arguments.lengths:
        size = length * CHANNELS * BYTES / 2**20
        table = Table(title=f"{size:,.0f} MiB, THP_MEM_ALLOC_ENABLE {asked}, {arguments.threads} threads")
        for column in ("call", "ms", "in the system, all threads", "page faults"):
            table.add_column(column, justify="left" if column == "call" else "right")
        for name, cost in compare(length, arguments.rounds).items():
            table.add_row(name, f"{cost.milliseconds:.1f}", f"{cost.in_the_system:.0f}", f"{cost.faults:,.0f}")
        Console().print(table)


if __name__ == "__main__":
    main()
