"""One token at a time and long prompts: the 125M GateLoop in every form for decoding, compared with GPT-2 of its size.

    python -m benchmarks.decoding
    python -m benchmarks.decoding --only rows

Random weights, 2 threads. GateLoop has 12 layers of 624 channels, GPT-2's vocabulary, and its head and embedding tied.
GPT-2 is transformers' own, with its cache of keys and values. Times are medians in milliseconds, taken in turn in one
run. Steps are timed in blocks: torch and Numba have separate threads, which keep waiting for work after a step and
would slow the other's. The rate at which torch sums a large tensor in the same run bounds them all. The rows are
streams side by side, a token of each in one step. Prompts are read by a stream of quantised weights, with the logits
after the last token only, as compiled programs and by the packed model's own operations; these times are minima.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.table import cpu_name, keep
from benchmarks.timing import seconds_of
from recurra._process import keep_large_blocks
from recurra.decoding.linear import DTYPES
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY, CONTEXTS, PROMPT = 50257, (128, 1024, 8192), 8192
ROWS = (1, 8, 64)  # streams side by side
PROMPTS, QUANTISED = (1, 2, 4, 8, 15), ("int8", "int4")
BLOCK = 4  # timed steps in a row, after one that is not timed
SUMMED = 320_000_000  # bytes
SUM = torch.ones(SUMMED // 4).sum


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


class Ours:
    """Streams of one of our models side by side, each `position` tokens long."""

    def __init__(self, model: Any, position: int, n_streams: int = 1) -> None:
        self.model, self.token = model, torch.zeros(n_streams, 1, dtype=torch.int64)
        _, self.state = model(self.token)
        for _ in range(0, position - 1, 4096):  # which tokens were read does not affect the time, only how many
            _, self.state = model(torch.randint(VOCABULARY, (n_streams, min(4096, position - 1))), self.state)

    def step(self) -> None:
        _, self.state = self.model(self.token, self.state)


class Gpt2:
    """A stream of GPT-2 with `position` tokens in its cache."""

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
            block = [1e3 * seconds_of(step) for _ in range(BLOCK)]
            times[name] += block if turn else []  # the first round warms up
    return times


def one_stream(forms: dict[str, Any], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time steps of one stream in every form, and of GPT-2; and long prompts."""
    model, other = forms["as it is"], gpt2()
    streams: dict[str, Ours | Gpt2] = {f"GateLoop, {name}": Ours(form, 100) for name, form in forms.items()}
    streams["GateLoop, float32, at 100,000 tokens"] = Ours(forms["float32"], 100_000)
    streams |= {f"GPT-2, {context:,} tokens in its cache": Gpt2(other, context) for context in CONTEXTS}
    times = timed({name: stream.step for name, stream in streams.items()} | {"sum": SUM}, rounds)
    prompt = torch.randint(VOCABULARY, (1, PROMPT))
    prefill = {
        "GateLoop": 1e3 * seconds_of(lambda: model.head(model.hidden(prompt)[0][:, -1])),
        "GPT-2": 1e3 * seconds_of(lambda: other(prompt, logits_to_keep=1, use_cache=True)),
    }
    table = Table("one token", "ms", "over GateLoop, float32")
    for name in streams:
        value = statistics.median(times[name])
        table.add_row(name, f"{value:.2f}", f"{value / statistics.median(times['GateLoop, float32']):.2f}")
    for name, value in prefill.items():
        table.add_row(f"{name}, {PROMPT:,} tokens at once", f"{value:,.0f}", f"{value / prefill['GateLoop']:.2f}")
    Console().print(table)
    return times, prefill


def many_rows(forms: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Time steps of several streams side by side."""
    pairs = list(itertools.product(forms, ROWS))
    streams = {f"{name}, {rows} rows": Ours(forms[name], 1, rows) for name, rows in pairs}
    times = timed({name: stream.step for name, stream in streams.items()} | {"sum": SUM}, rounds)
    medians = {name: statistics.median(times[name]) for name in streams}
    table = Table("a step", "ms", "over one row", "tokens/s, over one row's", "over int8")
    for name, rows in pairs:
        value = medians[f"{name}, {rows} rows"]
        ratio = value / medians[f"{name}, 1 rows"]
        of_int8 = value / medians[f"int8, {rows} rows"]
        table.add_row(f"{name}, {rows} rows", f"{value:.2f}", f"{ratio:.2f}", f"{rows / ratio:.1f}", f"{of_int8:.2f}")
    Console().print(table)
    return times


def read(model: Any, prompt: torch.Tensor, state: Any) -> None:
    model.head(model.hidden(prompt, state)[0][:, -1])


def short_prompts(forms: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Time short prompts of one stream, and a step."""
    steps: dict[str, Callable[[], object]] = {"sum": SUM}
    for name in QUANTISED:
        stream = Ours(forms[name], 1)
        steps[f"{name}, 1"] = stream.step
        for length in PROMPTS[1:]:
            prompt = torch.randint(VOCABULARY, (1, length))
            steps[f"{name}, {length}"] = partial(read, forms[name], prompt, stream.state)
            steps[f"{name}, {length}, operations"] = partial(read, forms[name].model, prompt, stream.state)
    times = timed(steps, rounds)
    table = Table("weights", "tokens", "ms, by operations", "ms, compiled", "over one token")
    for name, length in itertools.product(QUANTISED, PROMPTS):
        value, operations = min(times[f"{name}, {length}"]), times.get(f"{name}, {length}, operations")
        ratio = value / min(times[f"{name}, 1"])
        table.add_row(name, str(length), f"{min(operations):.2f}" if operations else "", f"{value:.2f}", f"{ratio:.2f}")
    Console().print(table)
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads for torch and the kernels (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help=f"blocks of {BLOCK} timed steps of each (default: 9)")
    parts = "one stream, several in one step, or short prompts (default: all)"
    parser.add_argument("--only", choices=("stream", "rows", "prompts"), help=parts)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    model = gateloop()
    numbers = QUANTISED if arguments.only == "prompts" else DTYPES
    forms = {"as it is": model} | {dtype: prepare(model, dtype) for dtype in numbers}
    result: dict[str, Any] = {"cpu": cpu_name(), "torch": torch.__version__, "threads": arguments.threads}
    result["parameters"] = sum(p.numel() for p in model.parameters())
    rates = []
    if arguments.only in (None, "stream"):
        result["ms"], result["prefill"] = one_stream(forms, arguments.rounds)
        rates += result["ms"]["sum"]
    if arguments.only in (None, "rows"):
        result["ms, rows"] = many_rows(forms, arguments.rounds)
        rates += result["ms, rows"]["sum"]
    if arguments.only in (None, "prompts"):
        result["ms, prompts"] = short_prompts(forms, arguments.rounds)
        rates += result["ms, prompts"]["sum"]
    result["sum, GB/s"] = [SUMMED / 1e6 / value for value in rates]
    print(f"torch.sum reads {statistics.median(result['sum, GB/s']):.1f} GB/s")
    keep(Path("runs/benchmarks-decoding.json"), result)


if __name__ == "__main__":
    main()
