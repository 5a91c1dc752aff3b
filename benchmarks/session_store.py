"""Where sessions are kept: an SQLite database, one commit for the turns that end together, against a file for each.

    python -m benchmarks.session_store

A turn writes a state of 60 kB and 16 tokens of a transcript. The file is written as the library writes all its files:
whole or not at all, by a rename, after fsync; and, for comparison, by a rename alone. Turns end one at a time, or 64 at
once. All are timed in turn in one process.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from recurra._files.writing import replacing
from recurra.serve import _store as store
from recurra.serve._store import SessionRecord, SessionStore, TranscriptPart

STATE, TOGETHER = 60_000, 64


def database(kept: SessionStore, names: list[str], turn: int) -> None:
    piece = TranscriptPart(16 * turn, bytes(64), bytes(64), bytes(16))
    records = [SessionRecord("", name, "model", 0.0, 0.0, 16 * turn, 0, bytes(256), bytes(STATE)) for name in names]
    for future in [kept.submit(store.write, record, piece) for record in records]:
        future.result()


def files(folder: Path, names: list[str], turn: int) -> None:
    for name in names:
        with replacing(folder / name) as file:
            file.write(bytes(STATE + 144 * (turn + 1)))


def renames(folder: Path, names: list[str], turn: int) -> None:
    for name in names:
        (folder / f"{name}.tmp").write_bytes(bytes(STATE + 144 * (turn + 1)))
        (folder / f"{name}.tmp").replace(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="(default: 30)")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        kept = SessionStore(Path(folder) / "sessions.sqlite")
        for kind in ("fsync", "rename"):
            (Path(folder) / kind).mkdir()
        ways: dict[str, Callable[[list[str], int], None]] = {
            "SQLite": lambda names, turn: database(kept, names, turn),
            "files with fsync": lambda names, turn: files(Path(folder) / "fsync", names, turn),
            "files without": lambda names, turn: renames(Path(folder) / "rename", names, turn),
        }
        names = [f"session{number}" for number in range(TOGETHER)]
        for turn in range(arguments.rounds):
            for way, write in ways.items():
                for count in (1, TOGETHER):
                    start = time.perf_counter()
                    write(names[:count], turn)
                    seconds = time.perf_counter() - start
                    found.setdefault(f"{way}, {count} together, ms a turn", []).append(1e3 * seconds / count)
        kept.close()
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in found.items()}, indent=1))


if __name__ == "__main__":
    main()
