"""Runs that a signal ends in the middle, in a process of their own; at the same record whatever the load."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

PROGRAM = """
import json, os, sys
from recurra.cli import main
from recurra.training.csv_log import CsvLog

write, records = CsvLog.write, []

def write_and_end(self, record):
    write(self, record)
    records.append(record)
    if len(records) == run["last_record"]:
        os.kill(os.getpid(), run["number"])

CsvLog.write = write_and_end
for run in json.loads(sys.argv[1]):
    records.clear()
    status = main(["train", *run["words"]])
    print("status", status, flush=True)
"""


class Ending(NamedTuple):
    """`recurra train WORDS` gets signal `number` once its log has `last_record` records."""

    number: signal.Signals
    last_record: int
    words: Sequence[str]


def train_until(*endings: Ending) -> subprocess.CompletedProcess[str]:
    """Train runs one after the other in one process, which prints their statuses; SIGKILL ends it."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([ending._asdict() for ending in endings])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
