"""One long stream through the model of GateLoop's Table 3 (4 blocks, 64 channels), with random weights.

    python -m benchmarks.stream cuts --steps 1000000
    python -m benchmarks.stream positions                # every mixer; a minute or two
    python -m benchmarks.stream gradient --steps 1000000 --piece 4096

`cuts` feeds the stream in pieces of three lengths and compares every logit with those of the longest pieces. The
recurrence itself is equal bit for bit; matrix products of one row and of many round differently, and how long such a
difference lives is up to the gates. `positions` times single tokens at places along the stream. `gradient` propagates a
loss at every step back to the start, piece by piece, in the memory of one piece.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import recurra
from benchmarks.table import keep, megabytes
from recurra._process import keep_large_blocks
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.shell import negative_log_likelihood
from recurra.state import n_bytes
from recurra.train.losses import checkpointed

VOCABULARY, OUTPUTS = 6, 51
PLACES, TIMED, PIECE = (1, 1_000, 10_000, 100_000), 100, 4_096


def _model(mixer: str = "gateloop") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(VOCABULARY, OUTPUTS, 4, 64, 128, mixer=mixer)).eval()


@torch.inference_mode()
def feed(model: LanguageModel, tokens: Tensor, chunk: int, logits: np.ndarray, compare: bool) -> dict[str, Any]:
    """Feed the stream in pieces of `chunk`; store the logits, or compare with those that are stored."""
    state, worst, resident = None, 0.0, []
    start, report = time.perf_counter(), max(1, tokens.shape[1] // chunk // 20)
    for i, at in enumerate(range(0, tokens.shape[1], chunk)):
        y, state = model(tokens[:, at : at + chunk], state)
        piece = y[0].numpy()
        if compare:
            worst = max(worst, float(np.abs(piece - logits[at : at + chunk]).max()))
        else:
            logits[at : at + chunk] = piece
        if i % report == 0:
            resident.append(round(megabytes("RssAnon"), 1))
    return {
        "chunk": chunk,
        "steps": tokens.shape[1],
        "largest difference of a logit": worst if compare else None,
        "tokens/s": round(tokens.shape[1] / (time.perf_counter() - start)),
        "resident MB along the stream": resident,
        "state bytes": n_bytes(state),
    }


def cuts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, results = _model(), []
    tokens = torch.randint(VOCABULARY, (1, arguments.steps))
    with tempfile.NamedTemporaryFile() as file:
        logits = np.memmap(file.name, np.float32, "w+", shape=(arguments.steps, OUTPUTS))
        for chunk in (PIECE, 997, 1):
            results.append(feed(model, tokens, chunk, logits, compare=chunk != PIECE))
            print(json.dumps(results[-1]), flush=True)
        print(f"largest logit: {np.abs(logits).max():.2f}")
    return results


@torch.inference_mode()
def positions(arguments: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    """Median microseconds of a step after each place, and the bytes of the state there."""
    results = {}
    print(f"{'microseconds a token after':26}", *(f"{place:>9,}" for place in PLACES), "  state, bytes, after each")
    for mixer in arguments.mixers:
        model, token, state, at, found = _model(mixer), torch.zeros(1, 1, dtype=torch.int64), None, 0, []
        for place in PLACES:
            while at < place:
                length = min(PIECE, place - at)
                _, state = model(torch.randint(VOCABULARY, (1, length)), state)
                at += length
            seconds = []
            for _ in range(TIMED):
                start = time.perf_counter()
                _, state = model(token, state)
                seconds.append(time.perf_counter() - start)
            at += TIMED
            found.append((statistics.median(seconds) * 1e6, n_bytes(state)))
        results[mixer] = found
        times, sizes = zip(*found)
        print(f"{mixer:26}", *(f"{value:9.0f}" for value in times), "  ", *(f"{size:,}" for size in sizes), flush=True)
    return results


def gradient(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the gradient of the mean loss over the stream."""
    keep_large_blocks()
    model, shape = _model().train(), (1, arguments.steps)
    tokens, targets = torch.randint(VOCABULARY, shape), torch.randint(OUTPUTS, shape)
    loss, _ = checkpointed(model, tokens[:, :64], piece=64, loss=_total, targets=targets[:, :64])
    loss.backward()  # kernels are compiled, and gradients have their memory
    model.zero_grad(set_to_none=False)
    before, start = megabytes("VmHWM"), time.perf_counter()
    loss, _ = checkpointed(model, tokens, piece=arguments.piece, loss=_total, targets=targets)
    (loss / arguments.steps).backward()
    seconds = time.perf_counter() - start
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    result = {
        "steps": arguments.steps,
        "piece": arguments.piece,
        "loss": loss.item() / arguments.steps,
        "gradient is finite": all(bool(gradient.isfinite().all()) for gradient in gradients),
        "seconds": round(seconds, 1),
        "steps/s": round(arguments.steps / seconds),
        "peak MB before": round(before),
        "peak MB": round(megabytes("VmHWM")),
    }
    print(json.dumps(result, indent=1))
    return result


def _total(logits: Tensor, targets: Tensor) -> Tensor:
    return negative_log_likelihood(logits, targets).sum()


WHAT = {"cuts": cuts, "positions": positions, "gradient": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--steps", type=int, default=1_000_000, help="length of the stream (default: 1,000,000)")
    parser.add_argument("--piece", type=int, default=PIECE, help="steps per piece of a gradient (default: 4,096)")
    parser.add_argument("--mixers", nargs="+", choices=recurra.list_mixers(), default=recurra.list_mixers())
    parser.add_argument("--threads", type=int, default=1, help="threads; a single stream has no use for more")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep(Path(f"runs/stream-{arguments.what}.json"), WHAT[arguments.what](arguments))


if __name__ == "__main__":
    main()
