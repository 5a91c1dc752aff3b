"""Durations are measured by clocks that nobody sets: the wall clock is read only for dates that people see."""

import re
from pathlib import Path

import recurra

READS = re.compile(r"\btime\.time(?:_ns)?\(|\b(?:datetime|date)\.(?:now|utcnow|today)\(|\bst_mtime|\bgetmtime\(")
DATES = {
    "data/_documents.py": 1,  # whether a corpus has changed: compared for equality
    "data/corpus.py": 1,  # the same of a shard
    "serve/_model.py": 1,  # `strftime_now` of chat templates
    "serve/_openai.py": 1,  # `created` of an answer
    "serve/_service.py": 1,  # `created` of the models
    "serve/_sessions.py": 2,  # when a session was opened and used
    "train/metrics.py": 2,  # of TensorBoard's files, which stay in order, and of its records
    "video/layouts.py": 1,  # whether a video has changed: compared for equality
}


def test_the_wall_clock_is_read_for_dates_alone():
    source = Path(recurra.__file__).parent
    found = {path.relative_to(source).as_posix(): len(READS.findall(path.read_text())) for path in source.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == DATES
