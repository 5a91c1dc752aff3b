"""`python -m benchmarks.scale.weak`: tokens/s of 1, 2 and 4 ranks with as much work for each (weak scaling).

The Memory Horizon recipe, `--batch` sequences a rank, one thread a rank, gloo on this machine, DDP. More ranks than
cores share them, so 4 ranks on 2 cores show what sharing costs, not a speed-up. Rounds take the numbers of ranks in
turn; medians. Prints a table in Markdown.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from recurra.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
RANKS = (1, 2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.weak", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank (default: 8)")
    parser.add_argument("--updates", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    speeds: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(arguments.rounds):
        for ranks in RANKS:
            speeds[ranks].append(speed(ranks, arguments.batch, arguments.updates))
    print(f"| ranks on {os.cpu_count()} cores | tokens/s | over one rank's | efficiency |\n|---:|---:|---:|---:|")
    alone = statistics.median(speeds[1])
    for ranks, found in speeds.items():
        times = statistics.median(found) / alone
        print(f"| {ranks} | {statistics.median(found):,.0f} | {times:.2f} | {times / ranks:.2f} |")
    return 0


def speed(ranks: int, batch: int, updates: int) -> float:
    """The median of the tokens/s that a run logs, its first ones left out."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "data.batch_size": batch * ranks,
            "training.max_steps": updates,
            "training.log_every": 10,
            "training.eval_every": 1_000_000,
            "training.save_every": 1_000_000,
            "training.threads": 1,
            "training.precision": "32-true",
            "training.accelerator": "cpu",
            "training.strategy": "ddp" if ranks > 1 else "auto",
            "training.tensorboard": False,
        }
        words = [f"--{key}={str(value).lower()}" for key, value in settings.items()]
        recipe = ROOT / "recipes/memory-horizon/data-controlled.yaml"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        command = [sys.executable, *(launcher if ranks > 1 else ["-m"]), "recurra", "train", str(recipe)]
        run = Path(folder) / "run"
        subprocess.run(
            [*command, "--run-dir", str(run), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        logged = [row["tokens_per_second"] for row in read_metrics(run / "log.jsonl")]
        return statistics.median(float(rate) for rate in logged[1:] if rate)


if __name__ == "__main__":
    sys.exit(main())
