"""Runs that a signal ends in the middle, in a process of their own; at the same record whatever the load."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.processes import Ended, Program

PROGRAM = """
import json, os
from recurra.cli import main
from recurra.train.metrics import JsonLog

write, records = JsonLog.write, []

def write_and_end(self, record):
    write(self, record)
    records.append(record)
    if len(records) == run["last_record"]:
        os.kill(os.getpid(), run["number"])

JsonLog.write = write_and_end
for run in json.loads(RUNS):
    records.clear()
    status = main(["train", *run["words"]])
    print("status", status, flush=True)
"""


class Ending(NamedTuple):
    """`recurra train WORDS` gets signal `number` once its log has `last_record` records."""

    number: signal.Signals
    last_record: int
    words: Sequence[str]


def train_until(folder: Path, *endings: Ending) -> Ended:
    """Train runs one after the other in one process, which prints their statuses; SIGKILL ends it."""
    runs = json.dumps([ending._asdict() for ending in endings])
    return Program(PROGRAM.replace("RUNS", repr(runs)), folder, OMP_NUM_THREADS="1").wait()
