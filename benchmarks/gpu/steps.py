"""Training steps of published recipes on the card: tokens/s, and the share of its arithmetic that they use.

python -m benchmarks.gpu.steps

A step is forward, backward, clipping and the optimiser's update on random tokens, in the recipe's batch and with the
state carried along. The arithmetic of a step is three times that of a forward pass as `recurra cost` counts it (matrix
products, attention and this library's operators). "MFU" is over the card's rate in its data sheet (dense bfloat16),
"of a product" over that of a matrix product of 8,192 measured here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.card import arguments, card_name, machine, place, timed, write
from recurra.analysis.cost import measured_cost
from recurra.models.registry import DataSizes, on_meta
from recurra.state import detach
from recurra.train.experiment import Experiment
from recurra.train.optimizer import build_optimizer
from recurra.train.recipe import load_recipe

RECIPES = {
    "recipes/memory-horizon/data-controlled.yaml": 6,
    "recipes/memory-horizon/data-controlled-muon.yaml": 6,
    "recipes/memory-horizon/transformer.yaml": 6,
    "recipes/ptb/three-layers-muon.yaml#crt-gru-n70-40-epochs": 10_000,
    "recipes/ptb/three-layers-muon.yaml#transformer-xl-n70-40-epochs": 10_000,
    "recipes/ptb/transformers.yaml#crt-gru-16-layers-n70": 10_000,
    "recipes/wikitext-103/gateloop.yaml": 50_257,
    "recipes/wikitext-103/transformers.yaml#transformer-xl-16-layers-n150": 267_735,
    "recipes/wikitext-103/transformers.yaml#crt-gru-16-layers-n150": 267_735,
}
"""And their vocabularies."""
PRECISIONS = ("bf16-mixed", "32-true")
DATA_SHEETS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""FLOP/s of dense products of bfloat16 with sums in float32."""
DRY_SIZES = ["--model.n_layer", "1", "--data.batch_size", "2", "--data.sequence_length", "32"]


def sizes(experiment: Experiment, vocabulary: int) -> tuple[DataSizes, int, int]:
    """What the model takes from its data, and a batch's sequences and steps."""
    data: Any = experiment.data
    if hasattr(data, "modulus"):
        return DataSizes(vocabulary, data.modulus, None), data.batch_size, data.sequence_length
    length = data.segment_length * data.bptt_segments
    return DataSizes(vocabulary, vocabulary, data.segment_length), data.batch_size, length


def flops_a_token(experiment: Experiment, taken: DataSizes, length: int) -> float | None:
    """Count the arithmetic of training on a token; None for a model that cannot be counted."""
    with on_meta():
        model = experiment.model.build(taken)  # type: ignore[arg-type]
    steps = getattr(model.config, "segment_length", None) or length
    try:
        cost = measured_cost(model, steps)
    except Exception as error:
        print(f"not counted: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return 3 * (cost.block_flops + cost.vocabulary_flops) / steps


def step_of(
    experiment: Experiment, taken: DataSizes, shape: tuple[int, int], device: torch.device, precision: str
) -> Callable[[], None]:
    """A call that makes one update of a fresh model."""
    torch.manual_seed(0)
    model = experiment.model.build(taken).to(device).train()  # type: ignore[arg-type]
    optimizer = build_optimizer(model, experiment.optimizer)
    tokens = torch.randint(taken.vocab_size, shape, device=device)
    targets = torch.randint(taken.output_size, shape, device=device)
    state: Any = None

    def run() -> None:
        nonlocal state
        mixed = torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
        with mixed:
            losses, state = model.loss(tokens, targets, state)  # type: ignore[operator]
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), experiment.optimizer.gradient_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = detach(state)

    return run


def rate_of_a_product(device: torch.device, size: int) -> float:
    """FLOP/s of a matrix product of bfloat16 numbers."""
    one, other = torch.randn(2, size, size, device=device).bfloat16()
    seconds = timed({"product": lambda: one @ other}, 20, device, warm_up=3)["product"]
    return 2 * size**3 / median(seconds)


def measured(recipe: str, vocabulary: int, device: torch.device, rounds: int, dry: bool) -> Iterator[dict[str, Any]]:
    experiment = load_recipe(recipe, [] if "memory-horizon" in recipe else ["--data.path", "none"])
    if dry and "data-controlled.yaml" not in recipe:
        with on_meta():
            experiment.model.build(sizes(experiment, vocabulary)[0])  # type: ignore[arg-type]
        yield {"recipe": recipe, "outlined": True}
        return
    if dry:
        experiment = load_recipe(recipe, DRY_SIZES)
    taken, batch, length = sizes(experiment, vocabulary)
    flops = flops_a_token(experiment, taken, length)
    peak = next((rate for name, rate in DATA_SHEETS.items() if name in card_name(device)), None)
    for precision in PRECISIONS:
        step = None
        if device.type == "cuda":  # the peak is this step's own
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found: dict[str, Any] = {"recipe": recipe, "precision": precision, "batch": batch, "steps": length}
        try:
            step = step_of(experiment, taken, (batch, length), device, precision)
            seconds = median(timed({"step": step}, rounds, device, warm_up=4, with_host=True)["step"])
            rate = batch * length / seconds
            found |= {"seconds": seconds, "tokens_per_second": rate, "flops_per_token": flops}
            if flops and peak:
                found["mfu"] = rate * flops / peak
            if device.type == "cuda":
                found["peak_bytes"] = torch.cuda.max_memory_allocated()
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        yield found


def main(words: list[str] | None = None) -> None:
    parser = arguments(__doc__, "steps.json", rounds=12)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    given = parser.parse_args(words)
    device = place(given.dry)
    product = rate_of_a_product(device, 64 if given.dry else 8192)
    print(f"a matrix product: {product / 1e12:.1f} TFLOP/s")
    found: list[dict[str, Any]] = []
    for recipe in given.only:
        try:
            for one in measured(recipe, RECIPES[recipe], device, given.rounds, given.dry):
                if one.get("flops_per_token") and "tokens_per_second" in one:
                    one["of_a_product"] = one["tokens_per_second"] * one["flops_per_token"] / product
                found.append(one)
        except Exception as error:
            found.append({"recipe": recipe, "error": f"{type(error).__name__}: {str(error)[:500]}"})
        print(found[-1], flush=True)
        write(given.out, {"machine": machine(device), "product": product, "results": found})
    if any("error" in one for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
