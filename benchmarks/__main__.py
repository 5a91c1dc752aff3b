"""`python -m benchmarks`: run everything, print it, keep it in runs/benchmarks.json."""

import argparse
from pathlib import Path

import torch

from benchmarks import rnn, scan, training_step
from benchmarks.table import save, show
from recurra._process import keep_large_blocks

SECTIONS = {
    "linear scan, time over torch.add's": scan.measure,
    "training step, tokens/s over": training_step.measure,
    "recurrent cells, time over torch.nn.GRU's": rnn.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads for torch and the kernels (default: 2)")
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each function (default: 31)")
    parser.add_argument("--peers", action="store_true", help="beside gateloop-transformer and JAX (make bench-peers)")
    parser.add_argument("--only", choices=["scan", "training_step", "rnn"], help="one section")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keep_large_blocks()
    results = {}
    for title, measure in SECTIONS.items():
        if arguments.only is None or measure.__module__.endswith(arguments.only):
            results[title] = show(title, measure(arguments.rounds, arguments.peers))
    save(Path("runs/benchmarks-peers.json" if arguments.peers else "runs/benchmarks.json"), results)


if __name__ == "__main__":
    main()
