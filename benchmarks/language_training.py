"""Training speed and peak memory of every language model at the size of the 3-layer Penn Treebank models.

    python -m benchmarks.language_training

3 layers of 380 channels, feed-forward 900, 10,000 words, embedding and head tied, batches of 10 rows of 140 random
tokens: the models of recipes/ptb/three-layers.yaml at segments of 70, and `LanguageModel` with every mixer. Each is
built and trained in a process of its own, whose peak of memory is the model's, a few updates at a time and in turn, so
that the machine's slow and fast minutes fall on all of them.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.table import cpu_name
from recurra import list_mixers
from recurra.models import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.training import DataSizes, build_optimizer, load_recipe
from recurra.training.allocator import keep_large_blocks
from recurra.training.config import OptimizerConfig

RECIPES = Path(__file__).parents[1] / "recipes" / "ptb" / "three-layers.yaml"
ROWS = ("transformer", "transformer-xl", "crt-gru", "crt-ncgru", "memory-only", "position-only")
OPTIONS: dict[str, dict[str, Any]] = {
    "gateloop": {"n_heads": 380},
    "linear-attention": {"n_heads": 10},
    "relative-attention": {"n_heads": 10, "segment_length": 70, "mem_len": 70},
    "retnet": {"n_heads": 10},
    "rotary-attention": {"n_heads": 10, "window": 140},
    "gateloop-attention": {"n_heads": 10, "window": 140},
}
"""Where a mixer's own options do not fit 380 channels or such rows."""

N_WORDS, BATCH, LENGTH = 10_000, 10, 140


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ROWS:
        return load_recipe(f"{RECIPES}#{name}-n70-8-epochs").model.build(DataSizes(N_WORDS, N_WORDS, 70))
    return LanguageModel(
        LanguageModelConfig(
            N_WORDS, None, 3, 380, 900, mixer=name, mixer_options=OPTIONS.get(name, {}), tie_embeddings=True
        )
    )


def train(name: str, updates: int, precision: str) -> dict[str, Any]:
    """Take some updates with the state carried along, the first of them not timed."""
    model = build(name).train()
    optimizer, state, seconds = build_optimizer(model, OptimizerConfig(learning_rate=1e-4)), None, []
    for _ in range(updates + 1):
        tokens = torch.randint(N_WORDS, (BATCH, LENGTH + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            losses, state = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        state = detach(state)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds[1:],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--threads", str(arguments.threads), "--updates", str(arguments.updates)]
    command = [sys.executable, "-m", "benchmarks.language_training", "--model", name, *options]
    done = subprocess.run([*command, "--precision", arguments.precision], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    names = [*ROWS, *list_mixers()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--updates", type=int, default=3, help="timed updates of each model in a round (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each model (default: 2)")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"], help="(default: 32-true)")
    parser.add_argument("--model", choices=names, help="one model, in this process: its numbers as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    if arguments.model:
        print(json.dumps(train(arguments.model, arguments.updates, arguments.precision)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in track(names * arguments.rounds, "training", transient=True):
        results[name].append(_in_a_process(name, arguments))
    table = Table("model", "parameters", "tokens/s", "over the Transformer's", "peak memory, MB")
    rates = {
        name: BATCH * LENGTH / statistics.median([s for result in several for s in result["seconds"]])
        for name, several in results.items()
    }
    for name, several in results.items():
        size, peak = several[0]["parameters"] / 1e6, max(result["peak"] for result in several) / 1e6
        ratio = rates[name] / rates["transformer"]
        table.add_row(name, f"{size:.1f}M", f"{rates[name]:,.0f}", f"{ratio:.2f}", f"{peak:,.0f}")
    Console().print(table)
    kept = Path(f"runs/benchmarks-language-training-{arguments.precision}.json")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({"cpu": cpu_name(), "torch": torch.__version__, "models": results}, indent=1))
    print(f"written: {kept}")


if __name__ == "__main__":
    main()
