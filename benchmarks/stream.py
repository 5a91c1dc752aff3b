"""A long stream: one token at a time and in chunks, the same outputs, memory flat.

    python -m benchmarks.stream --steps 1000000

Runs the model of GateLoop's Table 3 with random weights over one stream cut in three ways and compares every logit with
those of the largest chunks. The recurrence itself is equal bit for bit; matrix products of one row and of many round
differently, and how long such a difference lives is up to the gates.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import n_bytes

VOCABULARY, OUTPUTS = 6, 51


def _model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(VOCABULARY, OUTPUTS, 4, 64, 128)).eval()


def _resident_megabytes() -> float:
    """Memory of this process; files mapped into it, such as the stored logits, are not counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return float("nan")


@torch.inference_mode()
def run(model: LanguageModel, tokens: torch.Tensor, chunk: int, logits: np.ndarray, compare: bool) -> dict:
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
            resident.append(round(_resident_megabytes(), 1))
    seconds = time.perf_counter() - start
    return {
        "chunk": chunk,
        "steps": tokens.shape[1],
        "largest difference of a logit": worst if compare else None,
        "tokens/s": round(tokens.shape[1] / seconds),
        "resident MB along the stream": resident,
        "state bytes": n_bytes(state),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="length of the stream (default: 1,000,000)")
    parser.add_argument("--threads", type=int, default=1, help="threads; a single stream has no use for more")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = _model()
    tokens = torch.randint(VOCABULARY, (1, arguments.steps))
    results = []
    with tempfile.NamedTemporaryFile() as file:
        logits = np.memmap(file.name, np.float32, "w+", shape=(arguments.steps, OUTPUTS))
        for chunk in (4096, 997, 1):
            results.append(run(model, tokens, chunk, logits, compare=chunk != 4096))
            print(json.dumps(results[-1]), flush=True)
        print(f"largest logit: {np.abs(logits).max():.2f}")
    Path("runs").mkdir(exist_ok=True)
    Path("runs/stream.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
