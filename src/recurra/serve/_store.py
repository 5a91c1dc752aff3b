"""What lasts of a session: its transcript, its state as bytes, and the SQLite database that keeps both.

All calls run on one thread, and those that wait when a transaction begins share it: many small requests cost one
commit. A killed process loses nothing that was committed.
"""

import asyncio
import hashlib
import json
import logging
import queue
import sqlite3
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from filelock import FileLock, Timeout
from safetensors import torch as safetensors
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.state import fill_in, name_tensors, state_from_plain, state_to_plain

_LOG = logging.getLogger("recurra.serve")
_Result = TypeVar("_Result")

READ, WRITTEN = 0, 1
"""Where a token of a transcript is from."""


class TranscriptPart(NamedTuple):
    """Consecutive tokens as bytes of int32; log-probabilities as float32, NaN if unknown; origins as uint8."""

    start: int
    tokens: bytes
    logprobs: bytes
    origins: bytes


class Transcript:
    """The last tokens of a stream, with their log-probabilities and origins."""

    def __init__(self, most: int, first: int = 0) -> None:
        self._most = most
        self.first = first
        """The position before the first token that is kept."""
        self._tokens, self._logprobs, self._origins = array("i"), array("f"), array("B")

    def __len__(self) -> int:
        """The number of tokens of the stream, including those that are no longer kept."""
        return self.first + len(self._tokens)

    def append(self, token: int, logprob: float | None, origin: int) -> None:
        self._tokens.append(token)
        self._logprobs.append(float("nan") if logprob is None else logprob)
        self._origins.append(origin)
        if len(self._tokens) >= 2 * self._most:
            self._forget(len(self._tokens) - self._most)

    def _forget(self, count: int) -> None:
        del self._tokens[:count], self._logprobs[:count], self._origins[:count]
        self.first += count

    def tokens(self, start: int, end: int) -> list[int]:
        if not self.first <= start <= end <= len(self):
            raise LookupError(f"positions {start} to {end} of tokens {self.first} to {len(self)}")
        return self._tokens[start - self.first : end - self.first].tolist()

    def entries(self, start: int, end: int) -> list[tuple[int, float, int]]:
        part = slice(start - self.first, end - self.first)
        return list(zip(self._tokens[part], self._logprobs[part], self._origins[part]))

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on, which may be all that are kept."""
        self.first = min(self.first, end)
        n = end - self.first
        del self._tokens[n:], self._logprobs[n:], self._origins[n:]

    def copy(self, end: int) -> "Transcript":
        twin = Transcript(self._most, self.first)
        twin._tokens, twin._logprobs, twin._origins = self._tokens[:], self._logprobs[:], self._origins[:]
        twin.cut(end)
        return twin

    def part(self, start: int) -> TranscriptPart:
        """Return the tokens from `start` on, or from the first one that is kept."""
        start = max(start, self.first)
        n = start - self.first
        arrays = (self._tokens, self._logprobs, self._origins)
        return TranscriptPart(start, *(values[n:].tobytes() for values in arrays))

    @classmethod
    def from_parts(cls, parts: list[TranscriptPart], most: int, end: int) -> "Transcript":
        """Join consecutive parts that end at position `end`; there are none if all tokens are forgotten."""
        made = cls(most, parts[0].start if parts else end)
        for part in parts:
            made._tokens.frombytes(part.tokens)
            made._logprobs.frombytes(part.logprobs)
            made._origins.frombytes(part.origins)
        made._forget(max(0, len(made._tokens) - most))
        return made


_STRUCTURE = "structure"


def pack(state: Any) -> bytes:
    """Return a model's state as the bytes of a safetensors file: one block, without an overhead for each tensor."""
    tensors: dict[str, Tensor] = {}
    structure = name_tensors(state_to_plain(state), tensors)
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)
    return bytes(safetensors.save(tensors))


def unpack(packed: bytes, model: nn.Module) -> Any:
    try:
        # copies, each in its own memory: views would keep the bytes of all alive
        tensors = {name: tensor.clone() for name, tensor in safetensors.load(packed).items()}
        structure = json.loads(tensors.pop(_STRUCTURE).numpy().tobytes())
        return state_from_plain(fill_in(structure, tensors), model)
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"a saved state cannot be read: {error}") from error


_APPLICATION = 0x52656331
"""Marks a database as ours, in this layout."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, model TEXT NOT NULL, created REAL NOT NULL,
    used REAL NOT NULL, position INTEGER NOT NULL, recent BLOB NOT NULL, state BLOB NOT NULL, UNIQUE (owner, name));
CREATE TABLE IF NOT EXISTS transcripts (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, origins BLOB NOT NULL, PRIMARY KEY (session, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prefixes (
    number INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, owner TEXT NOT NULL, model TEXT NOT NULL,
    digest BLOB NOT NULL, tokens BLOB NOT NULL, state BLOB NOT NULL);
"""


class SessionRecord(NamedTuple):
    """A session as it is stored. `model` is a fingerprint, `recent` the last tokens as bytes of int32."""

    owner: str
    name: str
    model: str
    created: float
    used: float
    position: int
    recent: bytes
    state: bytes


class SessionInfo(NamedTuple):
    """A session in a list."""

    name: str
    model: str
    created: float
    used: float
    position: int


_MOST_LATER = 64
"""Actions without hurry that wait."""


class SessionStore:
    """The database of sessions and prefixes."""

    def __init__(self, path: Path | None = None) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable, tuple, Future] | None] = queue.SimpleQueue()
        self._later: deque[tuple[Callable, tuple, Future]] = deque(maxlen=_MOST_LATER)
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(path,), name="recurra-sessions", daemon=True)
        self._thread.start()
        self._ready.result()

    async def call(self, action: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run an action in a transaction, with the database in front of the arguments; return when it is committed."""
        return await asyncio.wrap_future(self.submit(action, *arguments))

    def submit(self, action: Callable[..., _Result], *arguments: Any) -> "Future[_Result]":
        """Queue an action; the future is done when it is committed."""
        future: Future[_Result] = Future()
        future.set_running_or_notify_cancel()  # a client that hangs up ends its wait, not the action
        self._calls.put((action, arguments, future))
        return future

    def submit_later(self, action: Callable[..., None], *arguments: Any) -> None:
        """Queue an action that may wait until nothing else does; if too many wait, the oldest are forgotten."""
        future: Future[None] = Future()
        future.add_done_callback(_warn)
        self._later.append((action, arguments, future))
        self.submit(_nothing)

    def close(self) -> None:
        """Commit what waits, and close the database."""
        self._calls.put(None)
        self._thread.join()

    def _run(self, path: Path | None) -> None:
        try:
            with _only_server(path):
                database = _opened(path)
                self._ready.set_result(None)
                while self._commit_waiting(database):
                    pass
                _transaction(database, list(self._later))
                database.close()
        except Exception as error:
            self._ready.set_exception(error)

    def _commit_waiting(self, database: sqlite3.Connection) -> bool:
        """Run the next actions in one transaction; return whether more may come."""
        calls = [self._calls.get()]
        while not self._calls.empty():
            calls.append(self._calls.get())
        now = [call for call in calls if call is not None and call[0] is not _nothing]
        if now:
            _transaction(database, now)
        elif self._later:
            _transaction(database, [self._later.popleft()])
        if self._later:
            self.submit(_nothing)
        return None not in calls


def _warn(future: "Future[None]") -> None:
    if (error := future.exception()) is not None:
        _LOG.warning("what the store keeps without hurry could not be written: %s", error)


def _nothing(database: sqlite3.Connection) -> None:
    """Wake the thread."""


def _transaction(database: sqlite3.Connection, calls: list[tuple[Callable, tuple, Future]]) -> None:
    done: list[tuple[Future, Any]] = []
    try:
        database.execute("BEGIN")
        for action, arguments, future in calls:
            database.execute("SAVEPOINT action")
            try:
                done.append((future, action(database, *arguments)))
            except Exception as error:  # this action alone fails
                database.execute("ROLLBACK TO action")
                future.set_exception(error)
            database.execute("RELEASE action")
        database.execute("COMMIT")
    except sqlite3.Error as error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        for *_, future in calls:
            if not future.done():
                future.set_exception(error)
        return
    for future, result in done:
        future.set_result(result)


def _only_server(path: Path | None) -> Any:
    """Lock a file for one server: each keeps sessions in memory, and two would overwrite each other's."""
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path.with_name(f"{path.name}.lock")).acquire(blocking=False)
    except Timeout:
        got, hint = f"{path}, which another server has open", "choose another one with --sessions"
        raise BlockingIOError(sentence("sessions file", got, "one that no server uses", hint)) from None


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        try:
            _set_up(database, path)
        except BaseException:
            database.close()
            raise
    except sqlite3.OperationalError as error:
        raise OSError(f"{path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        got = f"{path}, which is no database"
        raise ValueError(sentence("sessions file", got, "one that recurra serve wrote")) from error
    return database


def _set_up(database: sqlite3.Connection, path: Path | None) -> None:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        got = f"{path}, which another program or version wrote"
        raise ValueError(sentence("sessions file", got, "one that this recurra serve wrote"))
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA foreign_keys = ON")
    database.executescript(f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; COMMIT;")


# The actions: each runs inside a transaction.


def write(database: sqlite3.Connection, record: SessionRecord, part: TranscriptPart, is_all: bool = False) -> None:
    """Write a session, new or not; `part` replaces its transcript from there on, or all of it."""
    (number,) = database.execute(
        "INSERT INTO sessions (owner, name, model, created, used, position, recent, state) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, name) DO UPDATE SET model = excluded.model, "
        "used = excluded.used, position = excluded.position, recent = excluded.recent, state = excluded.state "
        "RETURNING number",
        record,
    ).fetchone()
    start = 0 if is_all else part.start
    database.execute("DELETE FROM transcripts WHERE session = ? AND start >= ?", (number, start))
    if part.tokens:
        database.execute("INSERT INTO transcripts VALUES (?, ?, ?, ?, ?)", (number, *part))


def read(database: sqlite3.Connection, owner: str, name: str) -> tuple[SessionRecord, list[TranscriptPart]] | None:
    """Read a session and the parts of its transcript; None if there is none."""
    row = database.execute(
        "SELECT number, owner, name, model, created, used, position, recent, state FROM sessions "
        "WHERE owner = ? AND name = ?",
        (owner, name),
    ).fetchone()
    if row is None:
        return None
    parts = database.execute(
        "SELECT start, tokens, logprobs, origins FROM transcripts WHERE session = ? ORDER BY start", row[:1]
    )
    return SessionRecord(*row[1:]), [TranscriptPart(*part) for part in parts]


def delete(database: sqlite3.Connection, owner: str, name: str) -> bool:
    return database.execute("DELETE FROM sessions WHERE owner = ? AND name = ?", (owner, name)).rowcount > 0


def infos(database: sqlite3.Connection, owner: str, limit: int, after: str = "") -> list[SessionInfo]:
    query = (
        "SELECT name, model, created, used, position FROM sessions WHERE owner = ? AND name > ? ORDER BY name LIMIT ?"
    )
    return [SessionInfo(*row) for row in database.execute(query, (owner, after, limit))]


def count(database: sqlite3.Connection, owner: str) -> int:
    return int(database.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()[0])


_TRIM_EVERY = 64
"""Prefixes between two looks at how much they take."""


def write_prefix(
    database: sqlite3.Connection, most_bytes: int, owner: str, model: str, tokens: bytes, state: Any
) -> None:
    """Write the state after a prefix, whose tokens are int32; at times, delete the oldest ones beyond `most_bytes`."""
    packed = pack(state)
    name = hashlib.sha256(json.dumps([owner, model]).encode() + tokens).digest()
    row = name, owner, model, _digest(tokens, packed), tokens, packed
    columns = "name, owner, model, digest, tokens, state"
    written = database.execute(f"INSERT OR REPLACE INTO prefixes ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    if written.lastrowid is not None and written.lastrowid % _TRIM_EVERY == 0:
        sizes = "SELECT number, sum(length(tokens) + length(state)) OVER (ORDER BY number DESC) AS size FROM prefixes"
        excess = f"SELECT max(number) FROM ({sizes}) WHERE size > ?"
        database.execute(f"DELETE FROM prefixes WHERE number <= ({excess})", (most_bytes,))


def read_prefixes(database: sqlite3.Connection, models: Mapping[str, nn.Module]) -> list[tuple[str, str, bytes, Any]]:
    """Read owner, model, tokens and state of the prefixes of these models, the newest last; skip damaged ones."""
    found = []
    for name, model in models.items():
        rows = database.execute(
            "SELECT number, owner, tokens, state, digest FROM prefixes WHERE model = ? ORDER BY number", (name,)
        )
        for number, owner, tokens, packed, digest in rows:
            with suppress(ValueError):  # a state of other code than this
                if digest != _digest(tokens, packed):
                    continue
                found.append((number, (owner, name, tokens, unpack(packed, model))))
    return [prefix for _, prefix in sorted(found, key=itemgetter(0))]


def _digest(tokens: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(tokens + packed).digest()
