"""The gradient of a whole stream: back-propagation through a million steps, piece by piece, in the memory of one.

    python -m benchmarks.long_gradient --steps 1000000 --piece 4096

Runs the model of recipes/memory-horizon/data-controlled.yaml with random weights and a random target at every step.
Prints the peak memory of the process beside what it was before, the seconds, and whether the gradient is finite.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.shell import negative_log_likelihood
from recurra.train._process import keep_large_blocks
from recurra.train.losses import checkpointed
from recurra.train.recipe import load_recipe

RECIPE = Path("recipes/memory-horizon/data-controlled.yaml")


def _model() -> LanguageModel:
    torch.manual_seed(0)
    shape = load_recipe(RECIPE).model
    return LanguageModel(LanguageModelConfig(vocab_size=6, output_size=51, **vars(shape)))


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(n_steps: int, piece: int) -> dict[str, Any]:
    """Compute the gradient of the mean loss over the stream."""
    model = _model()
    tokens, targets = torch.randint(6, (1, n_steps)), torch.randint(51, (1, n_steps))
    loss, _ = checkpointed(model, tokens[:, :64], piece=64, loss=_total, targets=targets[:, :64])
    loss.backward()  # kernels are compiled, and gradients have their memory
    model.zero_grad(set_to_none=False)
    before, start = _megabytes(), time.perf_counter()
    loss, _ = checkpointed(model, tokens, piece=piece, loss=_total, targets=targets)
    (loss / n_steps).backward()
    seconds = time.perf_counter() - start
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {
        "steps": n_steps,
        "piece": piece,
        "loss": loss.item() / n_steps,
        "gradient is finite": all(bool(gradient.isfinite().all()) for gradient in gradients),
        "seconds": round(seconds, 1),
        "steps/s": round(n_steps / seconds),
        "peak MB before": round(before),
        "peak MB": round(_megabytes()),
    }


def _total(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return negative_log_likelihood(logits, targets).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="length of the stream (default: 1,000,000)")
    parser.add_argument("--piece", type=int, default=4096, help="steps per piece (default: 4,096)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    result = run(arguments.steps, arguments.piece)
    print(json.dumps(result, indent=1))
    Path("runs").mkdir(exist_ok=True)
    Path("runs/long-gradient.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
