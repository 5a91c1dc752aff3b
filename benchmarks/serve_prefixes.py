"""What reusing prefixes saves: tokens read and CPU time to the first token, with the cache and without.

    python -m benchmarks.serve_prefixes

A chat of 20 turns, each of 60 new tokens and an answer of 100, and 200 requests at once that share 4,000 tokens and end
with 30 others. Times are those of the engine's thread, which a loaded machine does not change: to the first token of
each turn, the answer before it having been read in the background; or of each request. The model is a GateLoop of 2
layers of 64 channels in float32, with random weights. Both runs must write the same tokens.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._engine import Engine
from recurra.serve._model import ServedModel
from recurra.serve._prefixes import PrefixCache
from recurra.serve._requests import Event, Request, TokenEvent
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

VOCABULARY, NEW, ANSWER, SHARED, TAIL = 1000, 60, 100, 4000, 30


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=n)


@dataclass
class Run:
    """An engine in this thread, with the cache or without, and what it delivered."""

    served: ServedModel
    has_cache: bool
    first: dict[Request, float] = field(default_factory=dict)
    written: dict[Request, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = Engine(self._deliver, prefixes=PrefixCache(256 * 2**20) if self.has_cache else None)

    def _deliver(self, events: dict[Request, list[Event]]) -> None:
        for request, some in events.items():
            new = [event.id for event in some if isinstance(event, TokenEvent)]
            if new:
                self.first.setdefault(request, time.thread_time())
                self.written.setdefault(request, []).extend(new)

    def ask(self, prompts: Iterable[list[int]], n: int) -> list[Request]:
        config = GenerationConfig(max_tokens=n, sampling=SamplingConfig(temperature=0.0))
        requests = [Request(self.served, self.served.start, prompt, [config], owner="") for prompt in prompts]
        start = time.thread_time()
        for request in requests:
            self.engine.submit(request)
        while self.engine.is_busy:
            self.engine.round()
        for request in requests:
            self.first[request] -= start
        return requests


def chat(run: Run, turns: int) -> tuple[list[float], list[int]]:
    text, firsts = [], []
    for turn in range(turns):
        text += tokens(NEW, turn)
        (request,) = run.ask([list(text)], ANSWER)
        text += run.written[request]
        firsts.append(run.first[request])
    return firsts, text


def shared(run: Run, n_requests: int) -> tuple[list[float], list[int]]:
    requests = run.ask(([*tokens(SHARED, -1), *tokens(TAIL, number)] for number in range(n_requests)), 2)
    return [run.first[request] for request in requests], [token for one in requests for token in run.written[one]]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="(default: 20)")
    parser.add_argument("--requests", type=int, default=200, help="(default: 200)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    time.perf_counter = time.thread_time  # what the engine sets its pace by
    model = LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 64, 192)).eval()
    served = ServedModel("gateloop", model)
    served.warm_up()
    table = Table("", "cache", "tokens read", "first token, median ms", "last, ms", "same tokens")
    for name, measure, size in (("chat", chat, arguments.turns), ("shared prompt", shared, arguments.requests)):
        texts = []
        for has_cache in (True, False):
            run = Run(served, has_cache)
            firsts, text = measure(run, size)
            texts.append(text)
            times = [f"{1e3 * value:,.1f}" for value in (statistics.median(firsts), firsts[-1])]
            row = name, str(has_cache), f"{run.engine.counters.read:,}", *times, str(text == texts[0])
            print(*row, flush=True)
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
