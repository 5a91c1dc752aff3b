"""How much of the machine's matrix rate a long prompt gets: the 88M GateLoop of `benchmarks.decoding`.

    python -m benchmarks.prefill

A prompt of 2,048 tokens in one call, one stream, in float32 and, where the CPU multiplies it itself, in bfloat16 under
autocast. The matrix rate is torch's for the product of two square matrices of 2,048 in the same run; the share is what
the prompt's own matrix products would take at that rate, over the time of the call. Medians.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import VOCABULARY, gateloop
from benchmarks.table import cpu_name, keep
from benchmarks.timing import seconds_of
from recurra._process import keep_large_blocks

SIDE = 2048


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The median of `rounds` calls after one that is not timed."""
    return statistics.median([seconds_of(run) for _ in range(rounds + 1)][1:])


def products_of_a_token(model: torch.nn.Module) -> int:
    """Multiplications and additions in the blocks' matrices; the head reads the last token only."""
    return 2 * sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() == 2)  # type: ignore[union-attr]


@torch.inference_mode()
def measured(model: Any, prompt: torch.Tensor, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    square = torch.randn(SIDE, SIDE).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        call = seconds(lambda: model.head(model.hidden(prompt)[0][:, -1]), rounds)
        rate = 2 * SIDE**3 / seconds(lambda: square @ square, rounds)
    work = prompt.numel() * products_of_a_token(model)
    return {"ms": 1e3 * call, "tokens/s": prompt.numel() / call, "rate": rate, "share": work / call / rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048, help="the prompt's length (default: 2,048)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    model, prompt = gateloop(), torch.randint(VOCABULARY, (1, arguments.tokens))
    types = [torch.float32]
    types += [torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []
    results = {str(kind).removeprefix("torch."): measured(model, prompt, kind, arguments.rounds) for kind in types}
    table = Table("numbers", "ms", "tokens/s", "matrix rate, GFLOP/s", "share of it")
    for name, found in results.items():
        row = f"{found['ms']:,.0f}", f"{found['tokens/s']:,.0f}", f"{found['rate'] / 1e9:,.0f}", f"{found['share']:.2f}"
        table.add_row(name, *row)
    Console().print(table)
    path = Path("runs/benchmarks-prefill.json")
    keep(path, {"cpu": cpu_name(), "threads": arguments.threads, "prompts": results})


if __name__ == "__main__":
    main()
