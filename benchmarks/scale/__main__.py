"""`python -m benchmarks.scale CORPUS FOLDER`: prepare a large corpus and train on it, with kill -9 in both.

Prepares the corpus that `benchmarks.scale.corpus` wrote, once undisturbed and once with kills on the way; all files
must be the same, byte for byte. Then trains a small model on it to its end, and once more with kills on the way; the
logs must be the same. Memory is the largest resident set of any process, sampled. Results go to FOLDER/scale-*.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from recurra._files.digests import file_sha256, json_sha256, read_stamped
from recurra.data.corpus import INDEX
from recurra.train.metrics import read_metrics

RECIPE = """
experiment: text
data: {{path: {shards}, source: shards, batch_size: 4, eval_batch_size: 16, segment_length: 32}}
model: {{n_layer: 1, d_model: 32, d_channel_mixing: 64, mixer_options: {{d_qk: 32, d_v: 32}}, tie_embeddings: true}}
training: {{max_steps: {steps}, log_every: 5, save_every: 25, eval_every: 1000000, accelerator: cpu, threads: 1,
            tensorboard: false}}
"""
RECURRA = [sys.executable, "-m", "recurra"]
CLOCK = ("seconds", "tokens_per_second", "valid_loss", "valid_accuracy")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3, help="of preparing, and of training (default: 3 each)")
    parser.add_argument("--only", choices=["prepare", "train"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    draw, results = random.Random(0), {}
    if arguments.only != "train":
        results |= prepared(arguments, draw)
    if arguments.only != "prepare":
        results |= trained(arguments, draw)
    (arguments.folder / f"scale-{arguments.only or 'all'}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return int(not all(value for name, value in results.items() if name.startswith("same")))


def prepared(arguments: argparse.Namespace, draw: random.Random) -> dict:
    out, whole = arguments.folder / "shards", arguments.folder / "undisturbed"
    words = [*RECURRA, "prepare", str(arguments.corpus), "--workers", str(arguments.workers), "--out"]
    seconds, memory, _ = watched([*words, str(whole)], None)
    index = read_stamped(whole / INDEX)
    n = sum(shard["tokens"] for shards in index["splits"].values() for shard in shards)
    print(f"preparing: {seconds:.0f} s, {n / seconds:,.0f} tokens/s, {quarters(memory)}", flush=True)
    for _ in range(arguments.kills):
        took, _, status = watched([*words, str(out)], draw.uniform(0.4, 0.8) * seconds / arguments.kills)
        there = sum(1 for _ in out.glob("*.npy")) // 2
        print(f"preparing: {took:.0f} s, ended with {status}, {there} shards there", flush=True)
    took, _, status = watched([*words, str(out)], None)
    print(f"preparing: {took:.0f} s, ended with {status}", flush=True)
    digests = [{path.name: file_sha256(path) for path in folder.iterdir()} for folder in (whole, out)]
    return {
        "text_bytes": sum(path.stat().st_size for path in arguments.corpus.glob("*.txt")),
        "tokens": n,
        "vocabulary": index["vocab_size"],
        "shards": sum(map(len, index["splits"].values())),
        "prepare_seconds": seconds,
        "prepare_tokens_per_second": n / seconds,
        "prepare_resident_by_quarter_mib": quarters(memory),
        "prepare_kills": arguments.kills,
        "same_files_after_kills": digests[0] == digests[1],
        "shards_sha256": json_sha256(digests[1]),
    }


def quarters(samples: list[int]) -> list[int]:
    """The largest process in each quarter of a command's time, in MiB."""
    edges = [len(samples) * part // 4 for part in range(5)]
    return [max(samples[first:last], default=0) >> 20 for first, last in pairwise(edges)]


def trained(arguments: argparse.Namespace, draw: random.Random) -> dict:
    recipe = arguments.folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(shards=arguments.folder / "shards", steps=arguments.steps))
    whole, parts = arguments.folder / "whole", arguments.folder / "parts"
    for run in (whole, parts):
        shutil.rmtree(run, ignore_errors=True)
    took, memory, status = watched([*RECURRA, "train", str(recipe), "--run-dir", str(whole)], None)
    print(f"training: {took:.0f} s, {quarters(memory)} MiB, ended with {status}", flush=True)
    for _ in range(arguments.kills):
        begun = any(parts.glob("checkpoints/step-*.safetensors"))
        shutil.rmtree(parts, ignore_errors=True) if not begun else None
        words = ["--resume", str(parts)] if begun else [str(recipe), "--run-dir", str(parts)]
        took_part, _, status = watched([*RECURRA, "train", *words], draw.uniform(0.4, 0.9) * took)
        print(f"training in parts: {took_part:.0f} s, ended with {status}", flush=True)
    begun = any(parts.glob("checkpoints/step-*.safetensors"))
    words = ["--resume", str(parts)] if begun else [str(recipe), "--run-dir", str(parts)]
    watched([*RECURRA, "train", *words], None)
    rows = read_metrics(whole / "log.jsonl")
    speeds = sorted(float(row["tokens_per_second"]) for row in rows[2:] if row["tokens_per_second"])
    return {
        "train_kills": arguments.kills,
        "train_tokens_per_second": speeds[len(speeds) // 2],
        "train_resident_by_quarter_mib": quarters(memory),
        "same_log": measured(whole) == measured(parts),
    }


def measured(run: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(run / "log.jsonl")]


def watched(words: list[str], kill_after: float | None) -> tuple[float, list[int], int]:
    """Run a command in a session of its own, killed after a while.

    Returns seconds, the bytes of its largest process at each quarter of a second, and how it ended.
    """
    began, samples = time.perf_counter(), []
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.25)
        samples.append(max(map(resident, members(process.pid)), default=0))
        if kill_after is not None and time.perf_counter() - began > kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return time.perf_counter() - began, samples, process.returncode


def members(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
        except (OSError, IndexError):
            continue
    return found


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
