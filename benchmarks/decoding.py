"""One token at a time and long prompts: the 125M GateLoop in every form for decoding, beside GPT-2 of its size.

    python -m benchmarks.decoding

Random weights, 2 threads. GateLoop: 12 layers of 624 channels, GPT-2's vocabulary, head and embedding tied. GPT-2 is
transformers' own with its cache of keys and values. Times are medians in milliseconds, taken in turn in one run, in
blocks of steps: torch and Numba each have threads of their own, which wait for work a while after a step and would slow
the other's. Beside them stands the rate at which torch sums a large tensor in the same run, which bounds them all.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.table import cpu_name
from recurra.decoding import NUMBERS, RecordedStep, lay_out_linear_layers, prepare_for_decoding
from recurra.models import LanguageModel, LanguageModelConfig
from recurra.training.allocator import keep_large_blocks

VOCABULARY, CONTEXTS, PROMPT = 50257, (128, 1024, 8192), 8192
BLOCK = 4  # steps in a row that are timed, after one that is not
SUMMED = 320_000_000  # bytes


def gateloop() -> LanguageModel:
    torch.manual_seed(0)
    options = {"d_qk": 624, "d_v": 624, "n_heads": 624}
    return LanguageModel(
        LanguageModelConfig(VOCABULARY, None, 12, 624, 1872, mixer_options=options, tie_embeddings=True)
    ).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_positions=2 * PROMPT)).eval()


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


class Ours:
    """A stream of one of our models, `position` tokens long."""

    def __init__(self, model: Any, position: int) -> None:
        self.model, self.token = model, torch.zeros(1, 1, dtype=torch.int64)
        _, self.state = model(self.token)
        for _ in range(0, position - 1, 4096):  # what was read does not matter for the time, that much was does
            _, self.state = model(torch.randint(VOCABULARY, (1, min(4096, position - 1))), self.state)

    def step(self) -> None:
        _, self.state = self.model(self.token, self.state)


class Gpt2:
    """A stream of GPT-2 with so many tokens in its cache."""

    def __init__(self, model: Any, position: int) -> None:
        from transformers import DynamicCache

        self.model, self.token = model, torch.zeros(1, 1, dtype=torch.int64)
        heads, d_head = model.config.n_head, model.config.n_embd // model.config.n_head
        self.cache = DynamicCache()
        for layer in range(model.config.n_layer):
            self.cache.update(*(torch.randn(1, heads, position, d_head) for _ in range(2)), layer)

    def step(self) -> None:
        self.model(self.token, past_key_values=self.cache, use_cache=True)


def timed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            step()
            block = [milliseconds(step) for _ in range(BLOCK)]
            times[name] += block if turn else []  # the first round warms up
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads for torch and the kernels (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help=f"blocks of {BLOCK} timed steps of each (default: 9)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    model, other = gateloop(), gpt2()
    forms = {"as it is": model} | {numbers: prepare_for_decoding(model, numbers) for numbers in NUMBERS}
    forms["float32, recorded, not compiled"] = RecordedStep(lay_out_linear_layers(model), VOCABULARY)
    streams: dict[str, Ours | Gpt2] = {f"GateLoop, {name}": Ours(form, 100) for name, form in forms.items()}
    streams["GateLoop, float32, at 100,000 tokens"] = Ours(forms["float32"], 100_000)
    streams |= {f"GPT-2, {context:,} tokens in its cache": Gpt2(other, context) for context in CONTEXTS}
    steps = {name: stream.step for name, stream in streams.items()} | {"sum": torch.ones(SUMMED // 4).sum}
    times = timed(steps, arguments.rounds)
    rates = [SUMMED / 1e6 / value for value in times.pop("sum")]
    prompt = torch.randint(VOCABULARY, (1, PROMPT))
    prefill = {
        "GateLoop": milliseconds(lambda: model.head(model.hidden(prompt)[0][:, -1])),
        "GPT-2": milliseconds(lambda: other(prompt, logits_to_keep=1, use_cache=True)),
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    table = Table("one token", "ms", "over GateLoop, float32")
    for name, value in medians.items():
        table.add_row(name, f"{value:.2f}", f"{value / medians['GateLoop, float32']:.2f}")
    for name, value in prefill.items():
        table.add_row(f"{name}, {PROMPT:,} tokens at once", f"{value:,.0f}", f"{value / prefill['GateLoop']:.2f}")
    Console().print(table)
    print(f"torch.sum reads {statistics.median(rates):.1f} GB/s")
    parameters = {
        "GateLoop": sum(p.numel() for p in model.parameters()),
        "GPT-2": sum(p.numel() for p in other.parameters()),
    }
    kept = Path("runs/benchmarks-decoding.json")
    kept.parent.mkdir(exist_ok=True)
    result = {"cpu": cpu_name(), "torch": torch.__version__, "parameters": parameters, "ms": times, "prefill": prefill}
    result["sum, GB/s"] = rates
    kept.write_text(json.dumps(result, indent=1))
    print(f"written: {kept}")


if __name__ == "__main__":
    main()
