"""Sessions on disk: an SQLite database in WAL mode, written after every turn.

A killed process loses nothing that was committed, and a commit is whole or not there at all. All calls run on one
thread, and those that wait when a transaction begins share it: many small turns cost one commit.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock

from recurra.checks import sentence
from recurra.files.writing import take_lock
from recurra.serving.transcript import Piece

Result = TypeVar("Result")

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, label TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL, n_tokens INTEGER NOT NULL, recent BLOB NOT NULL,
    state BLOB NOT NULL, UNIQUE (owner, name, label));
CREATE TABLE IF NOT EXISTS pieces (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, surprises BLOB NOT NULL, origins BLOB NOT NULL, PRIMARY KEY (session, start)) WITHOUT ROWID;
"""


class Record(NamedTuple):
    """A session as it is stored. `model` is its fingerprint; `recent` the last tokens, as bytes of 32-bit integers."""

    owner: str
    name: str
    label: str
    model: str
    created: float
    used: float
    n_tokens: int
    recent: bytes
    state: bytes


class Line(NamedTuple):
    """A session in a list."""

    name: str
    model: str
    created: float
    used: float
    n_tokens: int


class SessionStore:
    """The database of sessions.

    Args:
        path: its file; None keeps it in memory.

    Raises:
        BlockingIOError: another server has it.
        OSError: the file cannot be opened, or not be written.
        ValueError: it is another program's, or of another version.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future] | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(path,), name="recurra-sessions", daemon=True)
        self._thread.start()
        self._ready.result()

    async def call(self, action: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run an action in a transaction; return when it is committed."""
        return await asyncio.wrap_future(self.submit(action))

    def submit(self, action: Callable[[sqlite3.Connection], Result]) -> "Future[Result]":
        """Queue an action; the future is done when it is committed."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # a client that hangs up ends its wait, not the action
        self._calls.put((action, future))
        return future

    def close(self) -> None:
        """Commit what waits, and close the database."""
        self._calls.put(None)
        self._thread.join()

    # --- the thread ---

    def _run(self, path: Path | None) -> None:
        held = None
        try:
            held = None if path is None else _locked(path)
            database = _opened(path)
        except Exception as error:
            self._ready.set_exception(error)
            _unlock(held)
            return
        self._ready.set_result(None)
        ended = False
        while not ended:
            calls = [self._calls.get()]
            while not self._calls.empty():
                calls.append(self._calls.get())
            ended = None in calls
            self._transaction(database, [call for call in calls if call is not None])
        database.close()
        _unlock(held)

    @staticmethod
    def _transaction(database: sqlite3.Connection, calls: list[tuple[Callable, Future]]) -> None:
        done: list[tuple[Future, Any]] = []
        try:
            database.execute("BEGIN")
            for action, future in calls:
                database.execute("SAVEPOINT action")
                try:
                    done.append((future, action(database)))
                except Exception as error:  # this action alone fails
                    database.execute("ROLLBACK TO action")
                    future.set_exception(error)
                database.execute("RELEASE action")
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            for _, future in calls:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in done:
            future.set_result(result)


def _locked(path: Path) -> FileLock | None:
    """Make this the only server of a file: each keeps sessions in memory, and would write over the other's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return take_lock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError:
        came, mend = f"{path}, which another server has open", "choose another one with --sessions"
        raise BlockingIOError(sentence("sessions file", came, "one that no server uses", mend)) from None


def _unlock(held: FileLock | None) -> None:
    if held is not None:
        held.release()


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        try:
            _set_up(database, path)
        except BaseException:
            database.close()
            raise
    except sqlite3.OperationalError as error:
        raise OSError(f"{path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(
            sentence("sessions file", f"{path}, which is no database", "one that recurra serve wrote")
        ) from error
    return database


def _set_up(database: sqlite3.Connection, path: Path | None) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT and (version or not _is_new(database)):
        raise ValueError(sentence("sessions file", f"{path}, in format {version}", f"format {FORMAT}"))
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA foreign_keys = ON")
    database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")


def _is_new(database: sqlite3.Connection) -> bool:
    """Whether a file without a version has no tables, or empty ones of ours: earlier code could be killed after it made
    them, and before it wrote the version."""
    ours = sqlite3.connect(":memory:")
    ours.executescript(_SCHEMA)
    query = "SELECT name, sql FROM sqlite_master"
    expected, found = set(ours.execute(query)), set(database.execute(query))
    ours.close()
    tables = [name for name, sql in found if sql]
    return found <= expected and not any(
        database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in tables
    )


# --- actions ---


def write(record: Record, piece: Piece | None, *, is_all: bool = False) -> Callable[[sqlite3.Connection], None]:
    """Write a session, new or not; `piece` replaces what its transcript has from there on, or all of it."""

    def action(database: sqlite3.Connection) -> None:
        (number,) = database.execute(
            "INSERT INTO sessions (owner, name, label, model, created, used, n_tokens, recent, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, name, label) DO UPDATE SET model = excluded.model, "
            "used = excluded.used, n_tokens = excluded.n_tokens, recent = excluded.recent, state = excluded.state "
            "RETURNING number",
            record,
        ).fetchone()
        if piece is not None:
            database.execute(
                "DELETE FROM pieces WHERE session = ? AND start >= ?", (number, 0 if is_all else piece.start)
            )
            if piece.tokens:
                database.execute("INSERT INTO pieces VALUES (?, ?, ?, ?, ?)", (number, *piece))

    return action


def read(owner: str, name: str, label: str = "") -> Callable[[sqlite3.Connection], tuple[Record, list[Piece]] | None]:
    """Read a session and the pieces of its transcript; None if there is none."""

    def action(database: sqlite3.Connection) -> tuple[Record, list[Piece]] | None:
        row = database.execute(
            "SELECT number, owner, name, label, model, created, used, n_tokens, recent, state FROM sessions "
            "WHERE owner = ? AND name = ? AND label = ?",
            (owner, name, label),
        ).fetchone()
        if row is None:
            return None
        pieces = database.execute(
            "SELECT start, tokens, surprises, origins FROM pieces WHERE session = ? ORDER BY start", row[:1]
        )
        return Record(*row[1:]), [Piece(*piece) for piece in pieces]

    return action


def delete(owner: str, name: str) -> Callable[[sqlite3.Connection], int]:
    """Delete a session and its copies; give how many rows there were."""
    return lambda database: (
        database.execute("DELETE FROM sessions WHERE owner = ? AND name = ?", (owner, name)).rowcount
    )


def lines(owner: str, limit: int, after: str = "") -> Callable[[sqlite3.Connection], list[Line]]:
    """List the sessions of an owner by name, those after `after`."""
    query = (
        "SELECT name, model, created, used, n_tokens FROM sessions WHERE owner = ? AND label = '' AND name > ? "
        "ORDER BY name LIMIT ?"
    )
    return lambda database: [Line(*row) for row in database.execute(query, (owner, after, limit))]


def labels(owner: str, name: str) -> Callable[[sqlite3.Connection], set[str]]:
    """Give the labels of a session's copies."""
    query = "SELECT label FROM sessions WHERE owner = ? AND name = ? AND label != ''"
    return lambda database: {label for (label,) in database.execute(query, (owner, name))}


def count(owner: str) -> Callable[[sqlite3.Connection], int]:
    """Count the sessions of an owner."""
    query = "SELECT count(*) FROM sessions WHERE owner = ? AND label = ''"
    return lambda database: int(database.execute(query, (owner,)).fetchone()[0])
