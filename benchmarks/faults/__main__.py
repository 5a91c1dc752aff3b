"""`python -m benchmarks.faults`: kill programs, let disks fail and damage files, and count what comes of it.

The exit code is 0 if every program came back the same, every disk that failed left a checkpoint that loads, and every
damaged file was refused in one sentence or read as it was. The same seed gives the same faults, except for the moments
of the kills. Results go to runs/faults.json, and the table is printed as Markdown.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.progress import Progress

from benchmarks.faults import kills
from benchmarks.faults.kinds import all_kinds
from benchmarks.faults.outcomes import BAD, CRASHED, GOOD, Tally, tally_mutants
from benchmarks.faults.writers import tally_disk_faults, writers
from recurra._files.writing import replacing

MUTANTS, KILLS, SEED = 2_000, 100, 0
SAMPLE = 20
"""The sample takes a twentieth of the kills and mutants."""


def main() -> int:
    kinds, disks = all_kinds(), {f"disk, {name}": make for name, make in writers().items()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sample", action="store_true", help=f"a {SAMPLE}th of everything, for minutes")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help=f"of each kind of file (default: {MUTANTS})")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"of programs (default: {KILLS})")
    parser.add_argument("--killed", nargs="*", metavar="PROGRAM", help="some of them: video, sweep, prepare, ...")
    parser.add_argument("--seed", type=int, default=SEED, help=f"for other faults (default: {SEED})")
    parser.add_argument("--only", nargs="*", choices=["kills", *disks, *kinds], help="some of the faults")
    arguments = parser.parse_args()
    share = SAMPLE if arguments.sample else 1
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = arguments.only or ["kills", *disks, *kinds]
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch, Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("faults", total=len(chosen))
        for number, name in enumerate(chosen):
            bar.update(task, description=name)
            folder = Path(scratch) / str(number)
            folder.mkdir()
            began = time.perf_counter()
            if name == "kills":
                found = kills.tally_kills(folder, -(-arguments.kills // share), arguments.seed, arguments.killed)
            elif name in disks:
                found = tally_disk_faults(disks[name](folder / "work"), folder)
            else:
                found = _in_a_child(name, folder, -(-arguments.mutants // share), arguments.seed)
            results[name] = _plain(*found) | {"seconds": time.perf_counter() - began}
            bar.advance(task)
    with replacing(Path("runs/faults.json")) as file:
        file.write((json.dumps(results, indent=1) + "\n").encode())
    print(as_markdown(results))
    for name, result in results.items():
        for line in result["wrong"]:
            print(f"{name}: {line}", file=sys.stderr)
    return int(any(result["wrong"] for result in results.values()))


def as_markdown(results: dict[str, dict]) -> str:
    """The results as tables: of runs and disks, and of damaged files by kind."""
    lines = ["| fault | outcome | times |", "|---|---|---:|"]
    files = {name: result["counts"] for name, result in results.items()}
    for name in [name for name in files if name == "kills" or name.startswith("disk, ")]:
        counts = files.pop(name)
        lines += [f"| {name} | {outcome} | {counts[outcome]} |" for outcome in sorted(counts)]
    shown = [outcome for outcome in (*GOOD, *BAD) if outcome in GOOD or any(outcome in c for c in files.values())]
    lines += ["", f"| file | mutants | {' | '.join(shown)} |", "|---|" + "---:|" * (len(shown) + 1)]
    for name, counts in files.items():
        cells = [str(counts.get(outcome, 0)) for outcome in shown]
        lines.append(f"| {name} | {sum(counts.values())} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(counts: Counter[str], wrong: list[str]) -> dict:
    return {"counts": dict(counts), "wrong": wrong}


def _in_a_child(name: str, folder: Path, n: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Damage files in a process of their own, so that a crash is an outcome and not the end."""
    context = multiprocessing.get_context("fork")  # everything is loaded here, and no thread has been started
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_tally, args=(name, folder, n, seed, sending))
    child.start()
    sending.close()
    try:
        tally: Tally = receiving.recv()
    except EOFError:
        tally = Tally()
        child.join()
        tally.add(CRASHED, name, f"exit code {child.exitcode}")
    child.join()
    return tally.counts, tally.examples


def _tally(name: str, folder: Path, n: int, seed: int, sending: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    sending.send(tally_mutants(all_kinds()[name], folder, n, seed))


if __name__ == "__main__":
    sys.exit(main())
