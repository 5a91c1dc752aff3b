"""A trained run fed one token at a time, in pieces and in whole segments: the largest difference of a logit.

python -m benchmarks.cuts runs/ptb-crt-gru-n35 [--data.path FOLDER]
"""

import argparse

import torch

from recurra import open_run
from recurra.state import n_bytes

PIECES = (1, 5, 64)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--steps", type=int, default=2000, help="tokens of the test split (default: 2000)")
    arguments, overrides = parser.parse_known_args()
    run = open_run(arguments.run, overrides=overrides)
    segment = run.experiment.data.segment_length
    tokens = torch.from_numpy(run.data.tokens("test")[: arguments.steps].astype("int64"))[None]
    whole = torch.cat(_feed(run.model, tokens, segment)[0], 1)
    print(f"{arguments.run}: {tokens.shape[1]} tokens, segments of {segment}, largest logit {whole.abs().max():.2f}")
    for piece in PIECES:
        outputs, bytes_ = _feed(run.model, tokens, piece)
        worst = (torch.cat(outputs, 1) - whole).abs().max()
        print(f"pieces of {piece:3}: largest difference {worst:.1e}, largest state {bytes_:,} bytes")


def _feed(model: torch.nn.Module, tokens: torch.Tensor, piece: int) -> tuple[list[torch.Tensor], int]:
    state, outputs, largest = None, [], 0
    for part in tokens.split(piece, 1):
        logits, state = model(part, state)
        outputs.append(logits)
        largest = max(largest, n_bytes(state))
    return outputs, largest


if __name__ == "__main__":
    main()
