"""`python -m benchmarks.scale.kills`: kill ranks of a run at random moments, go on with more or fewer, compare.

Each run is trained by 1, 2 or 4 ranks, started by torchrun's agent, with DDP or FSDP2 and asynchronous saving or not.
SIGKILL hits one rank or all, half of the times while a checkpoint is being written. After a few kills the run is
trained to its end, and its log must be that of the run that nobody killed, to 1e-4. Results go to
runs/scale-kills.json.
"""

import argparse
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from lightning_fabric import strategies
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.table import keep
from recurra.cli import main as recurra
from recurra.train import run as start
from recurra.train.checkpoint import CheckpointError, CheckpointFolder
from recurra.train.metrics import read_metrics

RECIPE = """
experiment: text
data: {{path: {corpus}, cache: {corpus}/cache, batch_size: 4, eval_batch_size: 4, segment_length: 8}}
model: {{n_layer: 2, d_model: 8, d_channel_mixing: 12, mixer_options: {{d_qk: 8, d_v: 8}}}}
optimizer: {{gradient_clip: 0.5, learning_rate: 0.01}}
averaging: {{start_step: 5, decay: 0.9}}
training: {{max_steps: 24, epochs: 9, log_every: 1, save_every: 2, eval_every: 6, accelerator: cpu, threads: 1,
            tensorboard: false}}
"""
KILLS_PER_RUN = 4
LOADED = (strategies, start, torch.distributed)  # before anything is forked: a rank then starts at once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.kills", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after this time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw, counts, began = Random(arguments.seed), Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe = written(folder)
        launched(1, ["train", str(recipe), "--run-dir", str(folder / "whole")]).wait()
        expected = curve(folder / "whole")
        for number in range(-(-arguments.kills // KILLS_PER_RUN)):
            if time.perf_counter() - began > 60 * arguments.minutes:
                break
            run = folder / f"run-{number}"
            outcome = killed_run(recipe, run, draw, counts)
            if outcome == "ended" and not same(curve(run), expected):
                outcome = "another log"
            left = outcome == "ended" and [str(path.relative_to(run)) for path in run.rglob("checkpoints/.*")]
            if left:
                outcome = f"left over: {', '.join(left)}"
            counts[f"run: {'the same log' if outcome == 'ended' else outcome}"] += 1
            shutil.rmtree(run)
            print(dict(counts), flush=True)
    keep(Path("runs/scale-kills.json"), counts)
    return int(counts["run: the same log"] != sum(n for name, n in counts.items() if name.startswith("run:")))


def written(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    for split, n_lines in (("train", 120), ("valid", 20), ("test", 5)):
        lines = (" ".join(f"w{(i * i + j) % 23}" for j in range(7 + i % 5)) for i in range(n_lines))
        (corpus / f"{split}.txt").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(corpus=corpus))
    return folder / "recipe.yaml"


def killed_run(recipe: Path, run: Path, draw: Random, counts: Counter) -> str:
    for _ in range(KILLS_PER_RUN):
        had, ranks = saved(run), draw.choice((1, 2, 4))
        job = launched(ranks, words(recipe, run, draw, had))
        place = wait(run, job, draw)
        victims = job.ranks()
        chosen = victims if draw.random() < 0.5 else draw.sample(victims, min(1, len(victims)))
        for process in chosen:
            kill(process)
        counts[f"{'all' if len(chosen) > 1 or ranks == 1 else 'one'} of {ranks}, {place}"] += 1
        job.wait()
        if had and not saved(run):
            return "no checkpoint where there had been one"
    status = launched(draw.choice((1, 2, 4)), words(recipe, run, draw, saved(run))).wait()
    return "ended" if status == 0 else f"status {status}"


def words(recipe: Path, run: Path, draw: Random, had: bool) -> list[str]:
    if not had:
        shutil.rmtree(run, ignore_errors=True)
    options = ["--training.strategy", draw.choice(("ddp", "fsdp"))]
    options += ["--training.asynchronous_saving", draw.choice(("true", "false"))]
    return ["train", *(["--resume", str(run)] if had else [str(recipe), "--run-dir", str(run)]), *options]


def saved(run: Path) -> bool:
    """Say whether the run has a checkpoint that can be loaded; one that is damaged is an error."""
    try:
        CheckpointFolder(run / "checkpoints").load("last")
    except CheckpointError:
        if CheckpointFolder(run / "checkpoints").steps():
            raise
        return False
    return True


class launched:
    """A job of several ranks, under an agent in a process of its own."""

    def __init__(self, ranks: int, command: list[str]) -> None:
        self.n_ranks, self.process = ranks, os.fork()
        if self.process:
            return
        status = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            status = recurra(command) if ranks == 1 else agent(ranks, command)
        finally:
            os._exit(status)

    def ranks(self) -> list[int]:
        if self.n_ranks == 1:
            return [self.process]
        children = Path(f"/proc/{self.process}/task/{self.process}/children")
        found = [int(word) for word in children.read_text().split()] if children.exists() else []
        return found[: self.n_ranks] or [self.process]

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]) if self.process else 0


def agent(ranks: int, command: list[str]) -> int:
    config = LaunchConfig(
        1, 1, ranks, run_id="kills", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
        monitor_interval=0.05, max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, rank)(command)
    except ChildFailedError as error:
        return abs(error.get_first_failure()[1].exitcode)
    return 0


def rank(command: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's, which a fork inherits
    if status := recurra(command):
        sys.exit(status)


def wait(run: Path, job: launched, draw: Random) -> str:
    """Wait until a run has taken steps, and then for a random moment or for a checkpoint that is being written."""
    before = steps(run)
    until = time.perf_counter() + 120
    while time.perf_counter() < until and steps(run) < before + draw.randint(1, 4) and alive(job.process):
        time.sleep(0.02)
    if draw.random() < 0.5:
        time.sleep(draw.random())
        return "at any moment"
    until = time.perf_counter() + 20
    while time.perf_counter() < until and alive(job.process):
        if any(run.glob("checkpoints/.*.tmp")):
            time.sleep(draw.random() * 0.02)
            return "while a checkpoint is written"
    return "at any moment"


def steps(run: Path) -> int:
    file = run / "log.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def curve(run: Path) -> list[list[float]]:
    names = ("step", "tokens", "train_loss", "valid_loss", "gradient_norm")
    rows = read_metrics(run / "log.jsonl")
    return [[float("nan" if row[name] is None else row[name]) for name in names] for row in rows]


def same(one: list[list[float]], other: list[list[float]]) -> bool:
    alike = torch.tensor(one), torch.tensor(other)
    return alike[0].shape == alike[1].shape and bool(torch.isclose(*alike, rtol=1e-4, equal_nan=True).all())


if __name__ == "__main__":
    sys.exit(main())
