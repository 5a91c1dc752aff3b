"""What lasts of a session: its transcript, its state as bytes, and the SQLite database that keeps both.

All calls run on one thread, and those that wait when a transaction begins share it: many small requests cost one
commit. A killed process loses nothing that was committed.
"""

import asyncio
import hashlib
import json
import logging
import os
import queue
import sqlite3
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import torch as safetensors
from torch import nn

from recurra.serve._database import SOUND, disk_full, only_server, open_database
from recurra.state import state_from_tensors, state_to_tensors

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
    def from_parts(cls, parts: list[TranscriptPart], most: int, first: int, end: int) -> "Transcript":
        """Join parts that lead from position `first` to `end`. Raises ValueError if some are missing."""
        made = cls(most, first)
        for part in parts:
            made._tokens.frombytes(part.tokens)
            made._logprobs.frombytes(part.logprobs)
            made._origins.frombytes(part.origins)
        if len(made) != end:
            raise ValueError("its transcript has a gap")
        made._forget(max(0, len(made._tokens) - most))
        return made


def pack(state: Any) -> bytes:
    """Return a model's state as the bytes of a safetensors file: one block, without an overhead for each tensor."""
    # clones: tensors of a state can share memory, which the format refuses
    contiguous = {"memory_format": torch.contiguous_format}
    return bytes(safetensors.save({name: x.clone(**contiguous) for name, x in state_to_tensors(state).items()}))


def unpack(packed: bytes, model: nn.Module) -> Any:
    try:
        # copies, each in its own memory: views would keep the bytes of all alive
        return state_from_tensors({name: x.clone() for name, x in safetensors.load(packed).items()}, model)
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"a saved state cannot be read: {error}") from error


class SessionRecord(NamedTuple):
    """A session as it is stored. `model` is a fingerprint, `recent` the last tokens as bytes of int32.

    Its transcript begins after `first` tokens.
    """

    owner: str
    name: str
    model: str
    created: float
    used: float
    position: int
    first: int
    recent: bytes
    state: bytes


class SessionInfo(NamedTuple):
    """A session in a list; only its name is known if it is damaged."""

    name: str
    model: str | None = None
    created: float | None = None
    used: float | None = None
    position: int | None = None


class _Call(NamedTuple):
    action: Callable
    arguments: tuple
    future: Future


_MOST_LATER = 64
"""Actions without hurry that wait."""


class SessionStore:
    """The database of sessions and prefixes."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path and path.resolve()  # a link must not hide from another server that it is the same file
        self._identity: os.stat_result | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._later: deque[_Call] = deque(maxlen=_MOST_LATER)
        self.n_full = 0
        """Actions for which the disk had no room."""
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="recurra-sessions", daemon=True)
        self._thread.start()
        self._ready.result()

    async def call(self, action: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run an action in a transaction, with the database in front of the arguments; return when it is committed.

        Raises DiskFull, and sqlite3.Error for other faults of the database.
        """
        return await asyncio.wrap_future(self.submit(action, *arguments))

    def submit(self, action: Callable[..., _Result], *arguments: Any) -> "Future[_Result]":
        """Queue an action; the future is done when it is committed."""
        future: Future[_Result] = Future()
        future.set_running_or_notify_cancel()  # a client that hangs up ends its wait, not the action
        self._calls.put(_Call(action, arguments, future))
        return future

    def submit_later(self, action: Callable[..., None], *arguments: Any) -> None:
        """Queue an action that may wait until nothing else does; if too many wait, the oldest are forgotten."""
        future: Future[None] = Future()
        future.add_done_callback(_warn)
        self._later.append(_Call(action, arguments, future))
        self.submit(_nothing)

    def close(self) -> None:
        """Commit what waits, and close the database."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with only_server(self._path):
                database = open_database(self._path)
                self._identity = None if self._path is None else self._path.stat()
                self._ready.set_result(None)
                while self._commit_waiting(database):
                    pass
                self._transaction(database, list(self._later))
                database.close()
        except Exception as error:
            self._ready.set_exception(error)

    def _commit_waiting(self, database: sqlite3.Connection) -> bool:
        """Run the next actions in one transaction; return whether more may come."""
        calls = [self._calls.get()]
        while not self._calls.empty():
            calls.append(self._calls.get())
        now = [call for call in calls if call is not None and call.action is not _nothing]
        if now:
            self._transaction(database, now)
        elif self._later:
            self._transaction(database, [self._later.popleft()])
        if self._later:
            self.submit(_nothing)
        return None not in calls

    def _transaction(self, database: sqlite3.Connection, calls: list[_Call]) -> None:
        """Run actions in one transaction; if it fails, each in its own."""
        try:
            self._require_in_place()
            database.execute("BEGIN")
            results = [call.action(database, *call.arguments) for call in calls]
            database.execute("COMMIT")
        except Exception as error:
            with suppress(sqlite3.Error):  # SQLite may have rolled back already
                database.execute("ROLLBACK")
            for call in calls:
                self._transaction(database, [call]) if len(calls) > 1 else self._fail(call, error)
            return
        for call, result in zip(calls, results):
            call.future.set_result(result)

    def _require_in_place(self) -> None:
        """Raise sqlite3.OperationalError if the file went away: SQLite would go on writing to one without a name."""
        if self._path is None or self._identity is None:
            return
        with suppress(OSError):
            if os.path.samestat(self._path.stat(), self._identity):
                return
        raise sqlite3.OperationalError("it was removed, moved or replaced; put it back, or restart the server")

    def _fail(self, call: _Call, error: Exception) -> None:
        if (full := disk_full(error, self._path, call.arguments)) is not None:
            self.n_full += 1
            full.__cause__, error = error, full
        call.future.set_exception(error)


def _warn(future: "Future[None]") -> None:
    if (error := future.exception()) is not None:
        _LOG.warning("what the store keeps without hurry could not be written: %s", error)


def _nothing(database: sqlite3.Connection) -> None:
    """Wake the thread."""


# The actions: each runs inside a transaction.


def write(database: sqlite3.Connection, record: SessionRecord, part: TranscriptPart, is_all: bool = False) -> None:
    """Write a session, new or not; `part` replaces its transcript from there on, or all of it."""
    columns = ", ".join(("digest", *SessionRecord._fields))
    updates = ", ".join(f"{name} = excluded.{name}" for name in ("digest", *SessionRecord._fields[2:]))
    (number,) = database.execute(
        f"INSERT INTO sessions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (owner, name) DO UPDATE SET {updates} RETURNING number",
        (_digest(*record), *record),
    ).fetchone()
    start = 0 if is_all else part.start
    database.execute("DELETE FROM transcripts WHERE session = ? AND start >= ?", (number, start))
    if part.tokens:
        row = number, part.start, _digest(*record[:2], *part), *part[1:]
        database.execute("INSERT INTO transcripts VALUES (?, ?, ?, ?, ?, ?)", row)


def read(database: sqlite3.Connection, owner: str, name: str) -> tuple[SessionRecord, list[TranscriptPart]] | None:
    """Read a session and the parts of its transcript; None if there is none. Raises ValueError if it is damaged."""
    row = database.execute(
        f"SELECT number, digest, {', '.join(SessionRecord._fields)} FROM sessions WHERE owner = ? AND name = ?",
        (owner, name),
    ).fetchone()
    if row is None:
        return None
    query = f"SELECT digest, {', '.join(TranscriptPart._fields)} FROM transcripts WHERE session = ? ORDER BY start"
    parts = database.execute(query, row[:1]).fetchall()  # an error would keep a cursor, which holds up the log
    if any(digest != _digest(owner, name, *part) for digest, *part in parts):
        raise ValueError("its transcript does not match its digests")
    return SessionRecord(*_sound(*row[1:])), [TranscriptPart(*part) for _, *part in parts]


def _sound(digest: Any, *values: Any) -> tuple[Any, ...]:
    if digest != _digest(*values):
        raise ValueError("its state does not match its digest")
    return values


def _digest(*values: Any) -> bytes:
    """Return the SHA-256 of a row: of its values and their lengths, in order."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        digest.update(b"%d " % len(data))
        digest.update(data)
    return digest.digest()


def exists(database: sqlite3.Connection, owner: str, name: str) -> bool:
    return database.execute("SELECT 1 FROM sessions WHERE owner = ? AND name = ?", (owner, name)).fetchone() is not None


def delete(database: sqlite3.Connection, owner: str, name: str) -> bool:
    return database.execute("DELETE FROM sessions WHERE owner = ? AND name = ?", (owner, name)).rowcount > 0


def infos(database: sqlite3.Connection, owner: str, limit: int, after: str = "") -> list[SessionInfo]:
    columns = f"CAST(name AS TEXT), model, created, used, position, {SOUND}"
    query = f"SELECT {columns} FROM sessions WHERE owner = ? AND name > ? ORDER BY name LIMIT ?"
    rows = database.execute(query, (owner, after, limit))
    return [SessionInfo(name, *values) if is_sound else SessionInfo(name) for name, *values, is_sound in rows]


def count(database: sqlite3.Connection, owner: str) -> int:
    return int(database.execute("SELECT count(*) FROM sessions WHERE owner = ?", (owner,)).fetchone()[0])


_TRIM_EVERY = 64
"""Prefixes between two looks at how much they take."""


def write_prefix(
    database: sqlite3.Connection, most_bytes: int, owner: str, model: str, tokens: bytes, state: Any
) -> None:
    """Write the state after a prefix, whose tokens are int32; at times, delete the oldest ones beyond `most_bytes`."""
    packed = pack(state)
    values = owner, model, tokens, packed
    row = _digest(owner, model, tokens), _digest(*values), *values
    columns = "name, digest, owner, model, tokens, state"
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
            "SELECT number, digest, owner, model, tokens, state FROM prefixes WHERE model = ? ORDER BY number", (name,)
        )
        for number, *row in rows:
            with suppress(ValueError):  # damaged, or a state of other code than this
                *prefix, packed = _sound(*row)
                found.append((number, (*prefix, unpack(packed, model))))
    return [prefix for _, prefix in sorted(found, key=itemgetter(0))]
