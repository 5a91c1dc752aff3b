"""Training speed and peak memory of every language model at the size of the 3-layer Penn Treebank models.

    python -m benchmarks.language_training

3 layers of 380 channels, feed-forward 900, 10,000 words, embedding and head tied, batches of 10 rows of 140 random
tokens: the models of recipes/ptb/three-layers.yaml at segments of 70, and `LanguageModel` with every mixer. Each is
built and trained in a process of its own, whose peak of memory is the model's, and takes its updates in turn with a
Transformer in another, so that the machine's slow and fast minutes fall on both. With `--beside FOLDER`, a checkout of
another commit (`git worktree add FOLDER COMMIT`), it takes them in turn with the same model of that commit instead.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.table import cpu_name, keep
from benchmarks.timing import median_ratio
from recurra import list_mixers
from recurra._process import keep_large_blocks
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import DataSizes
from recurra.state import detach
from recurra.train.config import OptimizerConfig
from recurra.train.optimizer import build_optimizer
from recurra.train.recipe import load_recipe

HERE = Path(__file__).parents[1]
RECIPES = HERE / "recipes" / "ptb" / "three-layers.yaml"
ROWS = ("transformer", "transformer-xl", "crt-gru", "crt-ncgru", "memory-only", "position-only")
OPTIONS: dict[str, dict[str, Any]] = {
    "gateloop": {"n_heads": 380},
    "linear-attention": {"n_heads": 10},
    "relative-attention": {"n_heads": 10, "segment_length": 70, "mem_len": 70},
    "retnet": {"n_heads": 10},
    "rotary-attention": {"n_heads": 10, "window": 140},
    "gateloop-attention": {"n_heads": 10, "window": 140},
    "gated-attention": {"n_heads": 10, "window": 140},
    "gla": {"n_heads": 5},
    "mamba2": {"n_heads": 10},
    "mamba3": {"n_heads": 10},
    "mla": {"n_heads": 10, "window": 140},
    "mlstm": {"n_heads": 10},
    "reformer": {"n_heads": 10, "window": 140},
    "hyena": {"window": 140},
}
"""Where a mixer's own options do not fit 380 channels or such rows."""

N_WORDS, BATCH, LENGTH = 10_000, 10, 140
WARM_UP = 3
"""Updates that are not timed: the first ones find the memory."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ROWS:
        return load_recipe(f"{RECIPES}#{name}-n70-8-epochs").model.build(DataSizes(N_WORDS, N_WORDS, 70))
    return LanguageModel(
        LanguageModelConfig(
            N_WORDS, None, 3, 380, 900, mixer=name, mixer_options=OPTIONS.get(name, {}), tie_embeddings=True
        )
    )


def train(name: str, precision: str) -> None:
    """Take an update for every line that comes, with the state carried along; give its seconds, a line each.

    The last line, once no more come, is the model's number of parameters and the process's peak of memory.
    """
    model = build(name).train()
    optimizer, state = build_optimizer(model, OptimizerConfig(learning_rate=1e-4)), None
    for _ in sys.stdin:
        tokens = torch.randint(N_WORDS, (BATCH, LENGTH + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            losses, state = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        state = detach(state)
        print(time.perf_counter() - start, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "peak": peak}))


class Trainee:
    """A model in a process of its own, which takes one update when it is told to; `checkout`: whose code it runs."""

    def __init__(self, name: str, arguments: argparse.Namespace, checkout: Path = HERE) -> None:
        options = ["--threads", str(arguments.threads), "--precision", arguments.precision, "--model", name]
        command = [sys.executable, "-m", "benchmarks.language_training", *options]
        code = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout, env=code
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout

    def update(self) -> float:
        """Give the seconds that one more update takes."""
        self.orders.write("update\n")
        self.orders.flush()
        return float(self.answers.readline())

    def finish(self) -> dict[str, Any]:
        """End the process; give the number of parameters and the peak of memory."""
        self.orders.close()
        found = json.loads(self.answers.readline())
        if self.process.wait():
            raise subprocess.CalledProcessError(self.process.returncode, self.process.args)
        return found


def in_turn(trainees: Mapping[str, Trainee], updates: int) -> dict[str, Any]:
    """Train two models in turn, so that slow and fast minutes of a machine fall on both.

    Returns the seconds of each by its key, and what the first one's process says of its model.
    """
    seconds: dict[str, list[float]] = {key: [] for key in trainees}
    for _ in range(WARM_UP + updates):
        for key, trainee in trainees.items():
            seconds[key].append(trainee.update())
    found, _ = (trainee.finish() for trainee in trainees.values())
    return {**found, **{key: times[WARM_UP:] for key, times in seconds.items()}}


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model in turn with the Transformer, or with itself of another commit."""
    other = Trainee(name, arguments, arguments.beside.absolute()) if arguments.beside else Trainee(ROWS[0], arguments)
    return in_turn({"of_model": Trainee(name, arguments), "of_other": other}, arguments.updates)


def main() -> None:
    names = [*ROWS, *list_mixers()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--updates", type=int, default=10, help="timed updates of each model (default: 10)")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"], help="(default: 32-true)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="(default: all of them)")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="a checkout whose models to compare with")
    parser.add_argument("--model", choices=names, help="one model, in this process: an update a line that comes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    if arguments.model:
        train(arguments.model, arguments.precision)
        return
    results = {name: measured(name, arguments) for name in track(arguments.only, "training", transient=True)}
    over = f"over {arguments.beside.name}'s" if arguments.beside else "over the Transformer's"
    table = Table("model", "parameters", "tokens/s", over, "peak memory, MB")
    for name, found in results.items():
        rate = BATCH * LENGTH / statistics.median(found["of_model"])
        ratio = median_ratio(found["of_other"], found["of_model"])
        peak = found["peak"] / 1e6
        table.add_row(name, f"{found['parameters'] / 1e6:.1f}M", f"{rate:,.0f}", f"{ratio:.2f}", f"{peak:,.0f}")
    Console(width=100).print(table)
    beside = f"-beside-{arguments.beside.name}" if arguments.beside else ""
    kept = Path(f"runs/benchmarks-language-training-{arguments.precision}{beside}.json")
    keep(kept, {"cpu": cpu_name(), "torch": torch.__version__, "models": results})


if __name__ == "__main__":
    main()
