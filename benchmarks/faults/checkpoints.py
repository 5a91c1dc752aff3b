"""Disks that fail at every call while a checkpoint is saved: the last checkpoint must load afterwards."""

from collections import Counter
from pathlib import Path
from typing import get_args

from benchmarks.faults.disk import Fault, FaultyDisk, Killed
from benchmarks.faults.kinds import train
from recurra.train.checkpoint import CheckpointFolder, Payload, load_checkpoint
from recurra.train.run_folder import RunFolder

STANDS = "the last checkpoint loads"
LOST = "the last checkpoint does not load"
ODD = "an error that is none of the disk's"


def tally_disk_faults(folder: Path) -> tuple[Counter[str], list[str]]:
    """Let every call that saves a checkpoint fail once, find the disk full, and be the last of a killed process.

    Returns:
        how often what came of it, by fault; and a line on each time that it went wrong.
    """
    counts: Counter[str] = Counter()
    wrong = []
    run = RunFolder(folder / "run")
    train(run.path)
    checkpoints = CheckpointFolder(run.checkpoints)
    _, saved = checkpoints.load("last")
    before = {path: path.read_bytes() for path in checkpoints.steps()}
    with FaultyDisk(run.path) as disk:
        checkpoints.save(13, _of_step(saved, 13))
    for fault in get_args(Fault):
        for number, call in enumerate(disk.calls):
            checkpoints.drop_after(12)
            for path, content in before.items():
                path.write_bytes(content)
            outcome = _save(checkpoints, run, _of_step(saved, 13), number, fault)
            counts[f"{fault}: {outcome}"] += 1
            if outcome != STANDS:
                wrong.append(f"{fault} at call {number}, {call}: {outcome}")
    return counts, wrong


def _of_step(saved: Payload, step: int) -> Payload:
    return {**saved, "position": {**saved["position"], "step": step}}


def _save(checkpoints: CheckpointFolder, run: RunFolder, payload: Payload, number: int, fault: Fault) -> str:
    with FaultyDisk(run.path, number, fault) as faulty:
        try:
            checkpoints.save(13, payload)
        except (OSError, Killed):
            pass
        except BaseException:
            return ODD
    replaced = "rename" in faulty.calls[:number]
    last = checkpoints.steps()[-1]
    try:
        step = load_checkpoint(last)["position"]["step"]
    except ValueError:
        return LOST
    return STANDS if step == (13 if replaced else 12) else LOST
