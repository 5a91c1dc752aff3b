"""What a long prompt costs those who write: the engine's rounds in CPU time, which a loaded machine does not change.

    python -m benchmarks.serve_prompt

64 streams of the 88M GateLoop in int8 write greedily on one thread, and a prompt of 8,192 tokens arrives. Between two
tokens of a stream lies one round: a step of the batch and, now, a piece of the prompt.
"""

import statistics
import time

import torch

from benchmarks.decoding import gateloop
from recurra.serve._engine import Engine
from recurra.serve._model import ServedModel
from recurra.serve._requests import Request
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

STREAMS, PROMPT, ROUNDS = 64, 8192, 60


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    time.perf_counter = time.thread_time  # what the engine sets its pace by
    served = ServedModel("gateloop", gateloop(), weights="int8")
    engine = Engine(lambda events: None)
    config = GenerationConfig(max_tokens=1000, sampling=SamplingConfig(temperature=0.0))

    def rounds(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = time.thread_time()
            engine.round()
            taken.append(1e3 * (time.thread_time() - start))
        return taken

    for number in range(STREAMS):
        engine.submit(Request(served, served.start, [number], [config]))
    rounds(4)
    before = statistics.median(rounds(25))
    prompt = Request(served, served.start, [1] * PROMPT, [config])
    engine.submit(prompt)
    rounds(4)
    read = prompt.n_read
    during = sorted(rounds(ROUNDS))
    worst, middle = during[int(0.99 * ROUNDS)], statistics.median(during)
    print(f"a round before: {before:.1f} ms; with the prompt: {middle:.1f}, 99% {worst:.1f}")
    print(f"99% over the median before: {worst / before:.2f}; {(prompt.n_read - read) / ROUNDS:.0f} tokens a round")


if __name__ == "__main__":
    main()
