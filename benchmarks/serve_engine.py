"""The server's engine without HTTP beside the library's own step, in one thread's processor time.

    python -m benchmarks.serve_engine

The 88M GateLoop of `benchmarks.decoding` in int8. Processor time does not depend on what else the machine does, so a
round of the engine can be compared with a step on a busy one. First tokens are those of requests that come at once.
"""

import argparse
import random
import statistics
import time
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import VOCABULARY, gateloop
from recurra.serve import _engine
from recurra.serve._model import ServedModel
from recurra.serve._requests import Event, Request, TokenEvent
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

CASES = ((1, 2), (1, 15), (1, 32), (8, 32), (64, 32))  # streams, and tokens of each prompt
clock = time.thread_time


def written(model: ServedModel, n_streams: int, n_prompt: int, n_tokens: int) -> tuple[list[float], list[float]]:
    """Return the times to the first tokens, and of rounds in which all streams are written, in seconds."""
    firsts: dict[Request, float] = {}
    counts: list[int] = []

    def deliver(events: dict[Request, list[Event]]) -> None:
        wrote = [request for request, some in events.items() if any(isinstance(one, TokenEvent) for one in some)]
        for request in wrote:
            firsts.setdefault(request, clock() - start)
        counts.append(len(wrote))

    engine, chance = _engine.Engine(deliver), random.Random(0)
    config = GenerationConfig(max_tokens=n_tokens, sampling=SamplingConfig(temperature=0))
    for _ in range(n_streams):
        prompt = [chance.randrange(VOCABULARY) for _ in range(n_prompt)]
        engine.submit(Request(model, model.start, prompt, [config], reports_prompt=False))
    start, rounds = clock(), []
    while engine.is_busy:
        counts.append(0)
        before, is_whole = clock(), len(firsts) == n_streams
        engine.round()
        if is_whole and counts[-1] == n_streams:
            rounds.append(clock() - before)
    return list(firsts.values()), rounds


def steps(model: ServedModel, n_streams: int, n_tokens: int) -> list[float]:
    tokens, times = torch.zeros(n_streams, 1, dtype=torch.int64), []
    _, state = model.runner(tokens)
    for _ in range(n_tokens):
        before = clock()
        _, state = model.runner(tokens, state)
        times.append(clock() - before)
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that each case runs (default: 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _engine.time = SimpleNamespace(perf_counter=clock, monotonic=time.monotonic)  # type: ignore[assignment]
    model = ServedModel("gateloop", gateloop(), weights="int8")
    model.warm_up()
    table = Table("streams", "prompt", "first token, median, ms", "last", "a round, ms", "a step, ms", "over it")
    for n_streams, n_prompt in CASES:
        firsts, rounds, alone = [], [], []
        for _ in range(arguments.rounds):
            found, more = written(model, n_streams, n_prompt, 100 if n_streams < 64 else 40)
            firsts.append((statistics.median(found), max(found)))
            rounds += more
            alone += steps(model, n_streams, 20)
        first, fastest, least = min(firsts), min(rounds, default=0.0), min(alone)
        numbers = (*first, fastest, least)
        cells = [f"{1e3 * value:,.2f}" for value in numbers]
        table.add_row(str(n_streams), str(n_prompt), *cells, f"{fastest / least:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
