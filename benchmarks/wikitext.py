"""The 16-layer WikiText-103 models of the CRT paper: parameters, one training step, memory, inference time (Table 6).

    python -m benchmarks.wikitext FOLDER                 # wiki.valid.tokens and wiki.test.tokens
    python -m benchmarks.wikitext FOLDER --only inference

The models are those of recipes/wikitext-103/transformers.yaml with random weights and the published 267,735 words. The
training text, which has them, is not needed: the two files' own words are spread over that many ranks.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.table import Row, save, show
from benchmarks.timing import interleaved, median_ratio
from recurra._process import keep_large_blocks
from recurra.data._text_batches import StreamSource
from recurra.data.text import TextConfig
from recurra.data.tokenizers import Vocabulary
from recurra.models.registry import DataSizes
from recurra.state import n_bytes
from recurra.train.experiment import Experiment
from recurra.train.optimizer import build_optimizer
from recurra.train.recipe import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes" / "wikitext-103" / "transformers.yaml"
MODELS = ("transformer", "transformer-xl", "crt-gru")
PUBLISHED = {"transformer": "151M", "transformer-xl": "151M", "crt-gru": "150M"}
N_WORDS = 267_735
FREQUENT = 10_000
"""Words of the two files that keep their rank; the text of 0.5M tokens has some 30,000 in all."""


def _experiment(model: str) -> Experiment:
    return load_recipe(f"{RECIPES}#{model}-16-layers-n150")


def _build(experiment: Experiment) -> nn.Module:
    torch.manual_seed(0)
    return experiment.model.build(DataSizes(N_WORDS, N_WORDS, experiment.data.segment_length))


def _tokens(folder: Path) -> dict[str, torch.Tensor]:
    """The two splits as numbers of the padded vocabulary."""
    texts = [(folder / f"wiki.{split}.tokens").read_text(encoding="utf-8") for split in ("valid", "test")]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "vocabulary.json"
        _vocabulary(Vocabulary.from_text(texts).words).save(path)
        data = TextConfig(path=str(folder), tokenizer=str(path), cache=place).build()
        return {split: torch.from_numpy(data.tokens(split).astype("int64")) for split in ("valid", "test")}


def _vocabulary(words: Sequence[str]) -> Vocabulary:
    """The published number of words: the given ones in their order, the first FREQUENT where they are, and the others,
    which occur a few times each, drawn at random over the rest: they fall into all clusters, as rare words do."""
    rare = FREQUENT + torch.randperm(N_WORDS - FREQUENT, generator=torch.Generator().manual_seed(0))
    spread = rare[: len(words) - FREQUENT].tolist()
    places = dict(zip([*range(FREQUENT), *spread], words))
    return Vocabulary([places.get(place, f"<absent-{place}>") for place in range(N_WORDS)])


def train_one_step(folder: Path, name: str, rows: int) -> dict[str, Any]:
    """Build a model and take one update on the valid split; score a stretch of the test split before and after it."""
    experiment = _experiment(name)
    model = _build(experiment)
    tokens = _tokens(folder)
    window = experiment.data.segment_length * experiment.data.bptt_segments
    batch = StreamSource(tokens["valid"].numpy(), batch_size=rows, segment_length=window, training=True).batch(0, 0)
    test = tokens["test"][None, :1501]

    def by_cluster(targets: torch.Tensor) -> list[int]:
        clusters = torch.bucketize(targets, torch.tensor(model.config.cutoffs), right=True)
        return torch.bincount(clusters.flatten(), minlength=1 + len(model.config.cutoffs)).tolist()

    def score() -> float:
        model.eval()
        with torch.inference_mode():
            return model.loss(test[:, :-1], test[:, 1:])[0].mean().item()

    before, optimizer = score(), build_optimizer(model, experiment.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = experiment.optimizer.learning_rate
    model.train()
    start = time.perf_counter()
    losses, state = model.loss(batch.inputs, batch.targets)
    losses.mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), experiment.optimizer.gradient_clip)
    optimizer.step()
    seconds = time.perf_counter() - start
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "published": PUBLISHED[name],
        "tokens of the step": batch.inputs.numel(),
        "targets by cluster": by_cluster(batch.targets),
        "of the test stretch": by_cluster(test[:, 1:]),
        "loss of the step": losses.mean().item(),
        "gradient norm": norm.item(),
        "test loss before": before,
        "test loss after": score(),
        "seconds": seconds,
        "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "state, bytes a row": n_bytes(state) // rows,
    }


def inference(folder: Path, batch_size: int, rounds: int) -> list[Row]:
    """Score one segment of 150 tokens a call, the state carried and warm, the three models in turn."""
    tokens = _tokens(folder)["valid"]
    length = 150
    streams = tokens[: batch_size * (tokens.numel() // batch_size)].view(batch_size, -1)
    inputs, targets = streams[:, :-1].split(length, 1), streams[:, 1:].split(length, 1)

    def caller(model: nn.Module):
        state, at = None, 0

        @torch.inference_mode()
        def call() -> None:
            nonlocal state, at
            _, state = model.loss(inputs[at], targets[at], state)
            at = (at + 1) % (len(inputs) - 1)

        return call

    seconds = interleaved({name: caller(_build(_experiment(name)).eval()) for name in MODELS}, rounds=rounds)
    what = f"{batch_size} x {length} tokens, 16 layers"
    targets_of = {"transformer": None, "transformer-xl": None, "crt-gru": 1.05}
    return [
        Row(what, name, seconds[name], median_ratio(seconds[name], seconds["transformer"]), targets_of[name])
        for name in MODELS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds wiki.valid.tokens and wiki.test.tokens")
    parser.add_argument("--only", choices=["step", "inference"], help="one part")
    parser.add_argument("--model", choices=MODELS, help="the training step of one model, in this process")
    parser.add_argument("--rows", type=int, default=8, help="rows of the training step, of 300 tokens (default: 8)")
    parser.add_argument("--batch", type=int, default=10, help="rows of an inference call (default: 10)")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls of each model (default: 11)")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    if arguments.model:
        print(json.dumps(train_one_step(arguments.folder, arguments.model, arguments.rows), indent=1))
        return
    if arguments.only != "inference":
        for name in MODELS:  # a process each: the peak of its memory is its own
            subprocess.run([sys.executable, "-m", "benchmarks.wikitext", *sys.argv[1:], "--model", name], check=True)
    if arguments.only != "step":
        title = "inference of the WikiText-103 models, time over the Transformer's"
        save(
            Path("runs/benchmarks-wikitext.json"),
            {title: show(title, inference(arguments.folder, arguments.batch, arguments.rounds))},
        )


if __name__ == "__main__":
    main()
