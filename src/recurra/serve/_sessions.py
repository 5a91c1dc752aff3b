"""Sessions: named streams that last. Those in memory are a cache of the database: `_write` saves one after each change.

All of it runs in one event loop. A session has one request at a time. If a change cannot be written to disk, the
session leaves the memory, and what the disk has counts.
"""

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

from recurra.checks import sentence
from recurra.serve import _store as store
from recurra.serve._database import DiskFull
from recurra.serve._http import DISK_FULL, ApiError, ServeSettings, refusal
from recurra.serve._model import PausedStream, ServedModel
from recurra.serve._requests import EndEvent, Event, Request, TokenEvent
from recurra.serve._store import READ, WRITTEN, SessionInfo, SessionRecord, SessionStore, Transcript, pack, unpack
from recurra.serve._streaming import AsyncEngine, EventQueue
from recurra.state import n_bytes

_LOG = logging.getLogger("recurra.serve")

_Key: TypeAlias = tuple[str, str]
_Entry: TypeAlias = tuple[int, float | None, int]
"""A token of a transcript, its log-probability and its origin."""
CHECKPOINT_EVERY = 16
"""Tokens between two checkpoints that a request makes."""
_MOST_CHECKPOINTS = 32
"""Checkpoints of one session."""
_MOST_PARTS = 64
"""Parts of a transcript on disk; then it is written as one."""


class _Checkpoints:
    """States along the transcripts of all sessions, for fast forks and rewinds: a bounded number for each session,
    spread evenly, and a bounded number of bytes in all. The least recently used session loses its states first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._states: OrderedDict[Hashable, list[PausedStream]] = OrderedDict()

    def add(self, session: Hashable, states: Iterable[PausedStream]) -> None:
        """Keep states of a session; if there are too many, drop those whose neighbours are closest."""
        kept = {state.position: state for state in (*self._states.get(session, ()), *states)}
        ordered = [kept[position] for position in sorted(kept)]
        while len(ordered) > _MOST_CHECKPOINTS:
            positions = [0, *(state.position for state in ordered)]
            gaps = [after - before for before, after in zip(positions, positions[2:])]
            del ordered[gaps.index(min(gaps))]  # never the last one
        self._set(session, ordered)
        while self._bytes > self._most_bytes and self._states:
            self._set(next(iter(self._states)), [])

    def up_to(self, session: Hashable, position: int) -> list[PausedStream]:
        if session in self._states:
            self._states.move_to_end(session)
        return [state for state in self._states.get(session, ()) if state.position <= position]

    def cut(self, session: Hashable, position: int) -> None:
        self._set(session, self.up_to(session, position))

    def forget(self, session: Hashable) -> None:
        self._set(session, [])

    def _set(self, session: Hashable, states: list[PausedStream]) -> None:
        old = self._states.pop(session, [])
        self._bytes += sum(n_bytes(one.model_state) for one in states) - sum(n_bytes(one.model_state) for one in old)
        if states:
            self._states[session] = states


@dataclass(eq=False)
class Session:
    """A session in memory."""

    key: _Key
    model: ServedModel
    state: PausedStream
    transcript: Transcript
    created: float
    used: float
    n_on_disk: int = 0  # tokens of the transcript that are on disk; -1 if it has to be written anew
    n_parts: int = 0
    first: int = 0  # the position before the first token on disk
    is_busy: bool = False

    @property
    def name(self) -> str:
        return self.key[1]

    def record(self, first: int) -> SessionRecord:
        """Return what is stored of it, apart from the transcript."""
        recent = array("i", self.state.recent).tobytes()
        times, places = (self.created, self.used), (self.state.position, first)
        return SessionRecord(*self.key, self.model.fingerprint, *times, *places, recent, pack(self.state.model_state))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def require_idle(self) -> None:
        if self.is_busy:
            message = f"session {self.name!r} has a turn that is not over; wait for it, or hang up on it"
            raise ApiError(409, message, code="session_busy", retry_after=1)


class Sessions:
    """The sessions of all keys."""

    def __init__(
        self, models: dict[str, ServedModel], engine: AsyncEngine, kept: SessionStore, settings: ServeSettings
    ) -> None:
        self._models, self._engine, self._store, self._settings = models, engine, kept, settings
        self._by_fingerprint = {model.fingerprint: model for model in models.values()}
        self._resident: OrderedDict[_Key, Session] = OrderedDict()
        self._checkpoints = _Checkpoints(settings.checkpoint_bytes)
        self._locks: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task] = set()

    @property
    def n_resident(self) -> int:
        return len(self._resident)

    async def open(self, owner: str, model: ServedModel, name: str | None) -> Session:
        return await self._add(owner, name, model, model.start, Transcript(self._settings.max_tokens))

    async def get(self, owner: str, name: str) -> Session:
        key = (owner, name)
        async with self._lock(key):
            session = self._resident.get(key) or await self._load(key)
        self._resident.move_to_end(key)
        return session

    async def infos(self, owner: str, limit: int, after: str) -> list[tuple[SessionInfo, str | None]]:
        """List the owner's sessions by name, each with the name of its model; None if that is not served."""
        found = await self._store.call(store.infos, owner, limit, after)
        names = {fingerprint: model.name for fingerprint, model in self._by_fingerprint.items()}
        return [(info, names.get(info.model or "")) for info in found]

    async def close(self, owner: str, name: str) -> None:
        key = (owner, name)
        async with self._lock(key):
            session = self._resident.get(key)
            if session is not None:
                session.require_idle()
            with session.busy() if session is not None else contextlib.nullcontext():
                if not await self._store.call(store.delete, owner, name):
                    raise _unknown_session(name)
                self._resident.pop(key, None)
            self._checkpoints.forget(key)

    async def fork(self, session: Session, name: str | None, position: int | None) -> Session:
        self._require_current(session, session.state)
        position = session.state.position if position is None else position
        with session.busy():
            state = await self._state_at(session, position)
            transcript = session.transcript.copy(position)
            twin = await self._add(session.key[0], name, session.model, state, transcript)
            self._checkpoints.add(twin.key, self._checkpoints.up_to(session.key, position))
        return twin

    async def rewind(self, session: Session, position: int) -> None:
        self._require_current(session, session.state)
        with session.busy():
            session.state = await self._state_at(session, position)
            session.transcript.cut(position)
            session.n_on_disk = -1
            self._checkpoints.cut(session.key, position)
            await self._write(session)

    async def _state_at(self, session: Session, position: int) -> PausedStream:
        """Return the stream at a position: a checkpoint, or the result of reading on from one."""
        if position == session.state.position:
            return session.state
        if position == 0:
            return session.model.start
        if position > session.state.position:
            raise refusal("position", position, f"at most {session.state.position}")
        start = [session.model.start, *self._checkpoints.up_to(session.key, position)][-1]
        try:
            tokens = session.transcript.tokens(start.position, position)
        except LookupError:
            message = sentence("position", position, f"one from {session.transcript.first} on: older tokens are gone")
            raise ApiError(409, message, code="position_forgotten") from None
        if not tokens:
            return start
        deadline = time.monotonic() + self._settings.request_seconds
        request = Request(session.model, start, tokens, [], checkpoint_every=CHECKPOINT_EVERY, deadline=deadline)
        events = [event async for some in self._engine.run(request) for event in some]
        end = events[-1]
        assert isinstance(end, EndEvent)
        if end.reason != "read":
            raise ApiError(503, f"the tokens could not be read again: {end.reason}")
        self._checkpoints.add(session.key, request.checkpoints)
        return end.state

    async def run(self, session: Session, request: Request) -> AsyncGenerator[list[Event], None]:
        """Run a request from the end of a session and yield its events; the last comes after it is on disk.

        If the caller goes away, or is far behind, the request is cancelled; tokens processed so far are kept.
        """
        self._require_current(session, request.start)
        events = EventQueue(request, self._engine.cancel)
        session.is_busy = True
        task = asyncio.create_task(self._follow(session, request, events))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        is_over = False
        try:
            async for some in events:
                yield some
            is_over = True
        finally:
            if not is_over:
                self._engine.cancel(request)

    async def _follow(self, session: Session, request: Request, events: EventQueue) -> None:
        """See a request through to its end, whether anybody listens or not."""
        # entries rather than events, whose details take much memory
        entries: list[_Entry] = [] if request.is_reported else [(token, None, READ) for token in request.tokens]
        try:
            async for some in self._engine.run(request):
                tokens = (event for event in some if isinstance(event, TokenEvent))
                entries += [(one.id, one.logprob, READ if one.was_read else WRITTEN) for one in tokens]
                if isinstance(end := some[-1], EndEvent):  # a session's request has one, its last event
                    some = [*some[:-1], await self._ended(session, request, entries, end)]
                events.put(some)
            events.close()
        except BaseException as error:
            events.close(error)
        finally:
            session.is_busy = False

    async def _ended(self, session: Session, request: Request, entries: list[_Entry], end: EndEvent) -> EndEvent:
        """Take the result of a request and write it; return its end, or an error if it could not be written."""
        session.used = time.time()
        if end.state is request.start:  # nothing of it counts
            return end
        try:
            for entry in entries:
                session.transcript.append(*entry)
            session.state = end.state
            self._checkpoints.add(session.key, [*request.checkpoints, request.start, end.state])
            await self._write(session)
        except Exception as error:
            _LOG.exception("a session could not be written")
            message = "the session could not be written, and stays where it was before this turn"
            if isinstance(error, DiskFull):
                return EndEvent(end.choice, "error", request.start, message=f"{message}: {error}", code=DISK_FULL)
            return EndEvent(end.choice, "error", request.start, message=message)
        return end

    async def settle(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    def _require_current(self, session: Session, state: PausedStream) -> None:
        """Refuse a session that is busy, has left `state`, or was deleted or read anew since it was found."""
        session.require_idle()
        if self._resident.get(session.key) is not session or session.state is not state:
            raise ApiError(409, f"session {session.name!r} has moved on meanwhile; try again", code="session_busy")

    async def _add(
        self, owner: str, name: str | None, model: ServedModel, state: PausedStream, transcript: Transcript
    ) -> Session:
        now = time.time()
        session = Session((owner, name or secrets.token_hex(8)), model, state, transcript, now, now)
        # one at a time for an owner, too, or sessions that are opened together would exceed the limit
        async with self._lock((owner, "")), self._lock(session.key):
            if session.key in self._resident or await self._store.call(store.exists, *session.key):
                message = sentence("name", f"{session.name!r}, which is taken", "a new one")
                raise ApiError(409, message, code="session_exists")
            if await self._store.call(store.count, owner) >= self._settings.max_sessions:
                message = f"this key has {self._settings.max_sessions} sessions; close some"
                raise ApiError(429, message, code="too_many_sessions")
            await self._write(session)
            self._resident[session.key] = session
        self._evict()
        return session

    async def _write(self, session: Session) -> None:
        """Write a session and the new part of its transcript; if that fails, forget it: what is on disk counts."""
        # A transcript on disk that goes further, or ends before the first token that is kept, is replaced.
        is_all = session.n_on_disk < session.transcript.first or session.n_parts >= _MOST_PARTS
        part = session.transcript.part(0 if is_all else session.n_on_disk)
        n_tokens = len(session.transcript)
        first = part.start if is_all else session.first
        try:
            await self._store.call(store.write, session.record(first), part, is_all)
        except BaseException:  # or the client has hung up, and it may fail later
            if self._resident.get(session.key) is session:
                del self._resident[session.key]
            self._checkpoints.forget(session.key)
            raise
        session.n_parts = 1 if is_all else session.n_parts + 1
        session.n_on_disk, session.first = n_tokens, first

    async def _load(self, key: _Key) -> Session:
        try:
            session = await self._read(key)
        except (ValueError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.OperationalError):  # not of this session
                raise
            message = f"session {key[1]!r} is damaged ({error}); delete it, or restore the sessions file from a copy"
            raise ApiError(410, message, code="session_damaged") from error
        self._resident[key] = session
        self._evict(but=key)
        return session

    async def _read(self, key: _Key) -> Session:
        found = await self._store.call(store.read, *key)
        if found is None:
            raise _unknown_session(key[1])
        record, parts = found
        model = self._by_fingerprint.get(record.model)
        if model is None:
            served = ", ".join(self._models)
            message = f"session {key[1]!r} is of a model that is not served now; expected one of {served}"
            raise ApiError(409, message, code="model_not_served")
        state = PausedStream(unpack(record.state, model.plain), tuple(array("i", record.recent)), record.position)
        transcript = Transcript.from_parts(parts, self._settings.max_tokens, record.first, record.position)
        sizes = len(transcript), len(parts), record.first
        return Session(key, model, state, transcript, record.created, record.used, *sizes)

    def _evict(self, but: _Key | None = None) -> None:
        """Forget the least recently used sessions beyond the limit, all but one: they are on disk."""
        excess = len(self._resident) - self._settings.max_resident_sessions
        idle = [key for key, session in self._resident.items() if not session.is_busy and key != but]
        for key in idle[: max(0, excess)]:
            del self._resident[key]
            self._checkpoints.forget(key)

    def _lock(self, key: _Key) -> asyncio.Lock:
        """One at a time for a key: two requests must not load, add or delete a session twice."""
        return self._locks.setdefault(key, asyncio.Lock())


def _unknown_session(name: str) -> ApiError:
    """The error if there is no such session, or it is another key's: both look the same."""
    return ApiError(404, f"session is {name!r}, which does not exist; expected an open one", code="session_not_found")
