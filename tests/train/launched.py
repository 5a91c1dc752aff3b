"""Jobs of several ranks: torchrun's own agent starts them, in processes that find torch imported."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import Ended, Program

PROGRAM = """
import json, os, signal, sys
import recurra.cli.train, recurra.train.run
import torch.distributed.fsdp, torch.distributed.checkpoint, lightning_fabric.strategies, torch.distributed.tensor
from recurra.cli import main
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def rank(job):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's, which a fork inherits
    exec(job.get("before", ""), {})
    status = main(job["words"])
    if status:
        sys.exit(status)

jobs = json.loads(JOBS)
if jobs[0]["ranks"] == 0:  # what it imports and compiles once, every rank after it would do again
    rank({**jobs[0], "words": [*jobs[0]["words"], "--run-dir", "first"]})
for job in jobs:
    if job["ranks"] == 0:
        child = os.fork()
        if child == 0:
            rank(job)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        continue
    nodes = job["nodes"]
    meeting = ("localhost:0", {}) if nodes == 1 else ("meeting", {"store_type": "file"})
    config = LaunchConfig(
        min_nodes=nodes, max_nodes=nodes, nproc_per_node=job["ranks"] // nodes, rdzv_backend="c10d",
        rdzv_endpoint=meeting[0], rdzv_configs=meeting[1], start_method="fork", run_id="test", monitor_interval=0.05,
        max_restarts=0,
    )
    other = os.fork() if nodes == 2 else None
    try:
        elastic_launch(config, rank)(job)
    except ChildFailedError as error:
        local, failure = error.get_first_failure()
        print("rank", local, "exit", failure.exitcode, failure.message, flush=True)
    if other == 0:
        sys.stdout.flush()
        os._exit(0)
    if other is not None:
        os.waitpid(other, 0)
"""


def launch(folder: Path, *jobs: dict[str, Any], timeout: float = 120) -> Ended:
    """Run `recurra WORDS` with so many ranks for each job, one after the other; 0 ranks are one process by itself.

    A first job with 0 ranks, a training, is run once more, before the others and in the process that they are forked
    from.

    A job is {"ranks": 4, "nodes": 1, "words": ["train", ...], "before": "code that each rank runs first"}. With two
    nodes, two agents meet and share the ranks; both are on this machine.
    """
    source = PROGRAM.replace("JOBS", repr(json.dumps(jobs)))
    return Program(source, folder, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR").wait(timeout)


def train(ranks: int, *words: object, nodes: int = 1, before: str = "") -> dict[str, Any]:
    """A job that trains."""
    return {"ranks": ranks, "nodes": nodes, "words": ["train", *map(str, words)], "before": before}


def write_corpus(folder: Path) -> Path:
    """Write a small corpus with a rule to learn."""
    folder.mkdir()
    for split, n_lines in (("train", 150), ("valid", 21), ("test", 9)):
        lines = (" ".join(f"w{(i * i + j * (i % 3 + 1)) % 23}" for j in range(7 + i % 5)) for i in range(n_lines))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_recipe(
    path: Path, corpus: Path, *, experiment: str = "text", data: str = "", model: str = "", more: str = ""
):
    """Write a recipe over the corpus, and return its path."""
    path.write_text(
        f"experiment: {experiment}\n"
        f"data: {{path: {corpus}, cache: {corpus}/cache, batch_size: 4, eval_batch_size: 3, segment_length: 8{data}}}\n"
        f"model: {{n_layer: 2, d_model: 8, d_channel_mixing: 12{model}}}\n"
        "training: {log_every: 1, eval_every: 3, save_every: 2, max_steps: 5, accelerator: cpu, threads: 1,\n"
        "           tensorboard: false, epochs: 3}\n"
        f"{more}\n"
    )
    return path


def curve(run: Path, names: Sequence[str] = ("train_loss", "valid_loss", "gradient_norm")) -> list[list[float]]:
    """Read the log of a run: the step and what was measured there, NaN where nothing was."""
    from recurra.train.metrics import read_metrics

    rows = read_metrics(run / "log.jsonl")
    return [[float("nan" if row[name] is None else row[name]) for name in ("step", "tokens", *names)] for row in rows]
