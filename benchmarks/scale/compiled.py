"""`python -m benchmarks.scale.compiled`: the tokens/s of a recipe with and without `training.compile`.

Two copies of the model of recipes/ptb/gateloop.yaml take their updates in turn, in one process, one as it is and one
compiled, on the same random words, with the state carried. Reported are the seconds of the first update of each, and
the medians of the later ones, by the clock and by the processor's seconds: the latter tell more on a busy machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from recurra._process import keep_large_blocks
from recurra.models.registry import DataSizes
from recurra.state import detach
from recurra.train.losses import Objective
from recurra.train.optimizer import build_optimizer
from recurra.train.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "ptb" / "gateloop.yaml"
N_WORDS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.compiled", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--updates", type=int, default=5, help="of each, after the first (default: 5)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of an update (default: the recipe's 32)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()
    updates = {name: updating(name == "compiled", arguments.batch_size) for name in ("as it is", "compiled")}
    for name, update in updates.items():
        wall, processor, loss = update()
        print(f"first update {name}: {wall:.1f} s, {processor:.1f} s of the processor, loss {loss:.4f}", flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in updates}
    for _ in range(arguments.updates):
        for name, update in updates.items():
            times[name].append(update()[:2])
    n_tokens = arguments.batch_size * 128
    for name, pairs in times.items():
        wall, processor = (statistics.median(values) for values in zip(*pairs))
        print(f"{name}: {n_tokens / wall:,.0f} tokens/s, {n_tokens / processor:,.0f} per second of the processor")
    ratio = statistics.median(a[1] / b[1] for a, b in zip(times["as it is"], times["compiled"]))
    print(f"compiled is {ratio:.2f} times as fast, by the processor's seconds, median of pairs")
    return 0


def updating(compiled: bool, batch_size: int) -> Callable[[], tuple[float, float, float]]:
    """Make a model, and return what makes an update and says how many seconds it took, and its loss."""
    experiment = load_recipe(RECIPE, ["--model.dropout", "0"])
    torch.manual_seed(0)
    model = experiment.model.build(DataSizes(N_WORDS, N_WORDS))
    objective = Objective(model, replace(experiment.training, compile=compiled))
    if compiled:
        objective.compile()
    optimizer = build_optimizer(model, experiment.optimizer)
    words = torch.Generator().manual_seed(1)
    state, targets = None, batch_size * 128

    def update() -> tuple[float, float, float]:
        nonlocal state
        tokens = torch.randint(N_WORDS, (batch_size, 129), generator=words)
        wall, processor = time.perf_counter(), time.process_time()
        _, loss, new = objective(tokens[:, :-1], tokens[:, 1:], targets, state)
        (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state = detach(new)
        return time.perf_counter() - wall, time.process_time() - processor, float(loss.detach()) / targets

    return update


if __name__ == "__main__":
    sys.exit(main())
