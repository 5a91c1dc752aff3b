"""The sessions file: an SQLite database for one server at a time, which is checked before anything is written to it."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from recurra._files.writing import NO_ROOM, free_bytes, locked
from recurra.checks import require, sentence

_APPLICATION = 0x52656332
"""Marks a database as ours, in this layout."""
SOUND = (
    "created BETWEEN 0 AND 1e12 AND used BETWEEN 0 AND 1e12 AND position BETWEEN 0 AND 9007199254740991 "
    "AND first BETWEEN 0 AND position"
)
"""What holds for the numbers of a session, and for no text, blob, NULL or infinity."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL, owner TEXT NOT NULL, name TEXT NOT NULL, model TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, position INTEGER NOT NULL, first INTEGER NOT NULL,
    recent BLOB NOT NULL, state BLOB NOT NULL, UNIQUE (owner, name), CHECK ({SOUND})) STRICT;
CREATE TABLE IF NOT EXISTS transcripts (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    start INTEGER NOT NULL CHECK (start BETWEEN 0 AND 9007199254740991), digest BLOB NOT NULL, tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL, origins BLOB NOT NULL, PRIMARY KEY (session, start)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prefixes (
    number INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, digest BLOB NOT NULL, owner TEXT NOT NULL,
    model TEXT NOT NULL, tokens BLOB NOT NULL, state BLOB NOT NULL) STRICT;
"""


def only_server(path: Path | None) -> Any:
    """Lock a file for one server: each keeps sessions in memory, and two would overwrite each other's."""
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)

    def refuse(holder: str) -> None:
        got, hint = f"{path}, which {holder} has open", "choose another one with --sessions"
        raise BlockingIOError(sentence("sessions file", got, "one that no server uses", hint)) from None

    return locked(path.with_name(f"{path.name}.lock"), refuse)


def open_database(path: Path | None) -> sqlite3.Connection:
    """Open a sessions file, new or not; None keeps it in memory.

    Raises ValueError if it is damaged or not ours, before a byte of it is changed; OSError if it cannot be opened.
    """
    require(sqlite3.sqlite_version_info >= (3, 37), "SQLite", sqlite3.sqlite_version, "version 3.37 or newer")
    with _in_a_sentence(path):
        if path is not None:
            _check(path)
        database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        try:
            database.text_factory = _text
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA foreign_keys = ON")
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA application_id = {_APPLICATION}; COMMIT;")
        except BaseException:
            database.close()
            raise
    return database


@contextmanager
def _in_a_sentence(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise disk_full(error, path, ()) or OSError(f"{path} cannot be opened: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # of a message with bytes of the file
        raise _refusal(path, f"is no database, or a damaged one ({error})") from error


def _refusal(path: Path | None, problem: str) -> ValueError:
    hint = "move it and its log (-wal) away to begin a new one, or save what is left with `sqlite3 FILE .recover`"
    got = f"{path}, which {' '.join(problem.split())}"
    return ValueError(sentence("sessions file", got, "one that this recurra serve wrote", hint))


def _check(path: Path) -> None:
    """Refuse a file that is damaged or not ours, through a connection that only reads.

    Values that are wrong in themselves are left to those who read them: the other sessions are sound.
    """
    log = path.with_name(f"{path.name}-wal")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} cannot be opened: it is no regular file")
    if not path.exists() or not path.stat().st_size:
        if log.exists() and log.stat().st_size:  # SQLite would delete it
            raise _refusal(path, f"is missing beside its log {log.name}")
        return
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.text_factory = _text
        database.execute("PRAGMA ignore_check_constraints = ON")
        problems = [text for (text,) in database.execute("PRAGMA integrity_check") if text != "ok"]
        if damage := [text for text in problems if " value in " not in text]:
            raise _refusal(path, f"is damaged ({damage[0]})")
        (application,) = database.execute("PRAGMA application_id").fetchone()
        tables = _tables(database)
    if (tables or application) and (application, tables) != (_APPLICATION, _our_tables()):
        raise _refusal(path, "another program or version wrote")


def _tables(database: sqlite3.Connection) -> set[str]:
    return {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")}


def _our_tables() -> set[str]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        return _tables(database)


def _text(text: bytes) -> str:
    """Decode a text, which is another one than before if it is damaged."""
    return text.decode(errors="replace")


class DiskFull(OSError):
    """There is no room for a write."""


_FRAME = 4096 + 24
"""Bytes of a page in the log, of which a row fills about 4,092."""


def disk_full(error: Exception, path: Path | None, values: Any) -> DiskFull | None:
    """Return what to say if writing `values`, tuples with bytes in them, failed for want of room."""
    is_full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
    if not is_full and not (isinstance(error, OSError) and error.errno in NO_ROOM):
        return None
    needed = _FRAME * (_n_bytes(values) // 4092 + 6)  # with the pages of tables and index
    name, got = "the memory of the sessions", "full"
    if path is not None:
        folder = path.absolute().parent
        mount = next(one for one in (folder, *folder.parents) if os.path.ismount(one))
        name, got = f"the file system of {path.name}", f"{mount}, which is full ({free_bytes(folder)} bytes are free)"
    return DiskFull(sentence(name, got, f"at least {needed} bytes", "free some, and repeat the request"))


def _n_bytes(values: Any) -> int:
    if isinstance(values, bytes):
        return len(values)
    return sum(map(_n_bytes, values)) if isinstance(values, tuple) else 0
