"""One token at a time with every mixer: time per token and state, from the start of a stream to far along it.

    python -m benchmarks.positions            # a minute or two on one thread

The model of GateLoop's Table 3 (4 blocks, 64 channels) with each registered mixer; between the timed places the
stream is fed in pieces of 4,096 tokens.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import recurra
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import n_bytes

PLACES = (1, 1_000, 10_000, 100_000)
PIECE, TIMED = 4_096, 100


@torch.inference_mode()
def measure(mixer: str) -> dict[int, tuple[float, int]]:
    """Median microseconds of a step after each place, and the bytes of the state there."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(6, 51, 4, 64, 128, mixer=mixer)).eval()
    token, state, at = torch.zeros(1, 1, dtype=torch.int64), None, 0
    found = {}
    for place in PLACES:
        while at < place:
            length = min(PIECE, place - at)
            _, state = model(torch.randint(6, (1, length)), state)
            at += length
        seconds = []
        for _ in range(TIMED):
            start = time.perf_counter()
            _, state = model(token, state)
            seconds.append(time.perf_counter() - start)
        at += TIMED
        found[place] = statistics.median(seconds) * 1e6, n_bytes(state)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=recurra.list_mixers(), default=recurra.list_mixers())
    parser.add_argument("--threads", type=int, default=1, help="(default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'microseconds a token after':26}", *(f"{place:>9,}" for place in PLACES), "  state, bytes, after each")
    results = {}
    for mixer in arguments.only:
        results[mixer] = measure(mixer)
        times, sizes = zip(*results[mixer].values())
        print(f"{mixer:26}", *(f"{value:9.0f}" for value in times), "  ", *(f"{size:,}" for size in sizes), flush=True)
    target = Path("runs/benchmarks-positions.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
