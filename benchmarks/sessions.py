"""Many streams in one process, each compared with itself alone.

    python -m benchmarks.sessions             # several minutes on one thread

Two hundred streams of the GateLoop language model and of the Compact Recurrent Transformer, with random weights, are
fed side by side in random order and lengths, forked and reset. Then each is fed alone what it had read, and the logits
after its last token and its state are compared; they differ only because matrix products of other sizes round
differently. The speeds together and alone are measured too.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from recurra.decoding import prepare
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import n_bytes, tensors
from recurra.streams.stream import Stream, Streams

VOCABULARY = 1000
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gateloop": lambda: LanguageModel(LanguageModelConfig(VOCABULARY, None, 4, 64, 128)),
    "crt-gru": lambda: CompactRecurrentTransformer(
        CompactRecurrentTransformerConfig(
            vocab_size=VOCABULARY, segment_length=35, n_layer=3, d_model=64, n_heads=4, d_channel_mixing=128
        )
    ),
}


def run(model: nn.Module, n_streams: int, n_turns: int, longest: int) -> dict:
    """Feed, fork and reset at random, then feed every stream alone and compare."""
    chance = random.Random(0)
    streams, read = Streams(model), {}
    for name in range(n_streams):
        streams.open(name)
        read[name] = []
    seconds, n_tokens, forks, resets = 0.0, 0, 0, 0
    for _ in range(n_turns):
        names = chance.sample(range(n_streams), chance.randint(1, n_streams))
        inputs = {n: [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, longest))] for n in names}
        start = time.perf_counter()
        streams.feed(inputs)
        seconds += time.perf_counter() - start
        n_tokens += sum(map(len, inputs.values()))
        for name in names:
            read[name] = read[name] + inputs[name]
        for one, other in zip(*[iter(chance.sample(range(n_streams), min(6, n_streams // 2 * 2)))] * 2):
            if chance.random() < 0.5:
                streams.close(other)
                streams.fork(one, other)
                read[other] = read[one]
                forks += 1
            else:
                streams[one].reset()
                read[one] = []
                resets += 1
    worst_logit, worst_state, alone_seconds, n_alone = 0.0, 0.0, 0.0, 0
    for name, stream in streams.items():
        assert stream.position == len(read[name])
        if not read[name]:
            assert stream.state is None
            continue
        alone = Stream(model)
        start = time.perf_counter()
        logits = alone.feed(read[name])
        alone_seconds += time.perf_counter() - start
        n_alone += len(read[name])
        worst_logit = max(worst_logit, float((logits - stream.logits).abs().max()))
        for pair in zip(tensors(alone.state), tensors(stream.state), strict=True):
            if pair[0].numel():
                worst_state = max(worst_state, float((pair[0] - pair[1]).abs().max()))
    return {
        "streams": n_streams,
        "turns": n_turns,
        "forks": forks,
        "resets": resets,
        "tokens": n_tokens,
        "positions": [min(map(len, read.values())), max(map(len, read.values()))],
        "largest difference of a logit": worst_logit,
        "largest difference in a state": worst_state,
        "largest logit": max(float(stream.logits.abs().max()) for stream in streams.values() if stream.position),
        "state bytes of all": sum(n_bytes(stream.state) for stream in streams.values()),
        "tokens/s together": round(n_tokens / seconds),
        "tokens/s alone, whole texts at once": round(n_alone / alone_seconds),
        "tokens/s alone, one at a time": round(_step_rate(_begun(Streams(model), 1))),
        "tokens/s together, one of each at a time": round(_step_rate(streams)),
    } | _prepared_rates(model)


def _prepared_rates(model: nn.Module) -> dict[str, int]:
    """Measure steps of the model and of its copy for decoding, alone and 8 side by side; float32 only."""
    if next(model.parameters()).dtype != torch.float32:
        return {}
    return {
        f"tokens/s of {n_streams}, one of each at a time, weights {weights}": round(
            _step_rate(_begun(streams, n_streams))
        )
        for weights in (None, "float32", "int8")
        for n_streams in (1, 8)
        for streams in [Streams(model, runner=None if weights is None else prepare(model, weights))]
    }


def _begun(streams: Streams, n_streams: int) -> Streams:
    """Open streams and feed them a few tokens, which compiles what is compiled."""
    for name in range(n_streams):
        streams.open(name)
    for _ in range(3):
        streams.feed({name: [1] for name in streams})
    return streams


def _step_rate(streams: Streams, n_steps: int = 100) -> float:
    """Measure tokens per second of all streams, one step after the other."""
    start = time.perf_counter()
    for _ in range(n_steps):
        streams.feed({name: [1] for name in streams})
    return n_steps * len(streams) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="(default: 200)")
    parser.add_argument("--turns", type=int, default=60, help="how many times some of them are fed (default: 60)")
    parser.add_argument("--longest", type=int, default=60, help="tokens in the longest text (default: 60)")
    parser.add_argument("--double", action="store_true", help="in float64, where the differences almost vanish")
    parser.add_argument("--threads", type=int, default=1, help="(default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model = build().eval()
        model = model.double() if arguments.double else model
        results[name] = run(model, arguments.streams, arguments.turns, arguments.longest)
        print(name, json.dumps(results[name], indent=1), flush=True)
    target = Path("runs/benchmarks-sessions.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
