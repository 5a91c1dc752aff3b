"""Sessions: named streams that last. What is in memory is a cache of the store, and every turn is written to it.

All of it runs in one event loop. A session has one turn at a time. If the disk does not take what changed, the session
leaves the memory: it is then what the disk has.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from recurra.checks import sentence
from recurra.serving import store
from recurra.serving.engine import Engine
from recurra.serving.http import ApiError, ServeSettings, unknown_session
from recurra.serving.model import Place, ServedModel
from recurra.serving.requests import EndEvent, Event, TokenEvent, Turn
from recurra.serving.store import READ, WRITTEN, Record, SessionStore, Transcript, pack, unpack
from recurra.serving.streaming import Backlog, LiveTurns
from recurra.state import n_bytes

MOST_A_SESSION = 32
EVERY = 16
"""Tokens between two marks that a turn makes."""


class Marks:
    """The marks of all sessions; the least recently used sessions lose theirs first.

    Args:
        most_bytes: for the states of all marks.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._marks: OrderedDict[Hashable, list[Place]] = OrderedDict()

    def add(self, session: Hashable, places: Iterable[Place]) -> None:
        """Keep places of a session; where there are too many, those go whose neighbours are closest."""
        kept = {place.n_tokens: place for place in (*self._marks.get(session, ()), *places)}
        ordered = [kept[number] for number in sorted(kept)]
        while len(ordered) > MOST_A_SESSION:
            del ordered[_least_missed(ordered)]
        self._set(session, ordered)
        while self._bytes > self._most_bytes and self._marks:
            self._set(next(iter(self._marks)), [])

    def nearest(self, session: Hashable, position: int) -> Place | None:
        """Give the last mark of a session that is not after `position`."""
        before = [place for place in self._marks.get(session, ()) if place.n_tokens <= position]
        if session in self._marks:
            self._marks.move_to_end(session)
        return before[-1] if before else None

    def cut(self, session: Hashable, position: int) -> None:
        """Forget the marks of a session after `position`."""
        self._set(session, [place for place in self._marks.get(session, ()) if place.n_tokens <= position])

    def copy(self, session: Hashable, twin: Hashable, position: int) -> None:
        """Give a twin the marks of a session up to `position`; they share their states."""
        self.add(twin, [place for place in self._marks.get(session, ()) if place.n_tokens <= position])

    def forget(self, session: Hashable) -> None:
        """Forget all marks of a session."""
        self._set(session, [])

    def _set(self, session: Hashable, places: list[Place]) -> None:
        old = self._marks.pop(session, [])
        self._bytes += sum(n_bytes(place.state) for place in places) - sum(n_bytes(place.state) for place in old)
        if places:
            self._marks[session] = places


def _least_missed(ordered: list[Place]) -> int:
    """The mark between the two that are closest to each other; never the last one."""
    numbers = [0, *(place.n_tokens for place in ordered)]
    gaps = [after - before for before, after in zip(numbers, numbers[2:])]
    return gaps.index(min(gaps))


LOG = logging.getLogger("recurra.serving")

Key: TypeAlias = tuple[str, str]
MOST_PIECES = 64
"""Pieces of a transcript on disk; then it is written as one."""


@dataclass(eq=False)
class Session:
    """A session in memory."""

    key: Key
    model: ServedModel
    place: Place
    transcript: Transcript
    created: float
    used: float
    n_written: int = 0
    """Tokens of the transcript that are on disk."""
    n_pieces: int = 0
    is_busy: bool = False

    @property
    def name(self) -> str:
        """What its owner calls it."""
        return self.key[1]

    def record(self, label: str = "") -> Record:
        """What the store keeps of it, without the transcript."""
        recent = array("i", self.place.recent).tobytes()
        owner, name = self.key
        return Record(
            *(owner, name, label, self.model.fingerprint, self.created, self.used),
            *(self.place.n_tokens, recent, pack(self.place.state)),
        )


class Sessions:
    """The sessions of all keys.

    Args:
        models: by name.
        engine: runs their turns.
        live: carries the engine's events.
        kept: where they are written.
        settings: the limits.
    """

    def __init__(
        self,
        models: dict[str, ServedModel],
        engine: Engine,
        live: LiveTurns,
        kept: SessionStore,
        settings: ServeSettings,
    ) -> None:
        self._models, self._engine, self._live, self._store, self._settings = models, engine, live, kept, settings
        self._by_fingerprint = {model.fingerprint: model for model in models.values()}
        self._resident: OrderedDict[Key, Session] = OrderedDict()
        self._marks = Marks(settings.mark_bytes)
        self._locks: dict[Key, asyncio.Lock] = {}
        self._running: set[asyncio.Task] = set()

    @property
    def n_resident(self) -> int:
        """How many are in memory."""
        return len(self._resident)

    # --- coming and going ---

    async def open(self, owner: str, model: ServedModel, name: str | None) -> Session:
        """Begin a session.

        Raises:
            ApiError: the name is taken, or the owner has as many sessions as allowed.
        """
        now = time.time()
        key = (owner, name or secrets.token_hex(8))
        session = Session(key, model, model.start, Transcript(self._settings.max_tokens), now, now)
        await self._add(session)
        return session

    async def get(self, owner: str, name: str) -> Session:
        """Find a session, in memory or on disk. Raises ApiError if there is none."""
        key = (owner, name)
        async with self._locked(key):
            session = self._resident.get(key)
            if session is None:
                session = await self._load(key)
        self._resident.move_to_end(key)
        return session

    async def lines(self, owner: str, limit: int, after: str) -> list[tuple[store.Line, str | None]]:
        """List the owner's sessions by name, each with the name of its model; None if that is not served."""
        found = await self._store.call(store.lines(owner, limit, after))
        named = {fingerprint: model.name for fingerprint, model in self._by_fingerprint.items()}
        return [(line, named.get(line.model)) for line in found]

    async def close(self, owner: str, name: str) -> None:
        """End a session and delete it from the disk. Raises ApiError if there is none, or it is busy."""
        key = (owner, name)
        async with self._locked(key):
            session = self._resident.get(key)
            if session is not None:
                _require_idle(session)
            with _busy(session):
                if not await self._store.call(store.delete(owner, name)):
                    raise unknown_session(name)
                self._resident.pop(key, None)
            self._marks.forget(key)

    # --- going back ---

    async def fork(self, session: Session, name: str | None, position: int | None) -> Session:
        """Begin a session that continues from a place of another.

        Raises:
            ApiError: the place is not in the transcript, the name is taken, or there are too many sessions.
        """
        self._require_free(session)
        position = session.place.n_tokens if position is None else position
        with _busy(session):
            place = await self._place_at(session, position)
            now = time.time()
            key = (session.key[0], name or secrets.token_hex(8))
            twin = Session(key, session.model, place, session.transcript.copy(position), now, now)
            await self._add(twin)
            self._marks.copy(session.key, key, position)
        return twin

    async def rewind(self, session: Session, position: int) -> None:
        """Go back to a place. Raises ApiError if it is not in the transcript."""
        self._require_free(session)
        with _busy(session):
            place = await self._place_at(session, position)
            session.transcript.cut(position)
            session.place = place
            session.n_written = -1
            self._marks.cut(session.key, position)
            await self._write(session)

    async def save(self, session: Session, label: str) -> int:
        """Keep a copy under a label; give its bytes. Raises ApiError if there are as many as allowed."""
        self._require_free(session)
        with _busy(session):
            labels, most = await self._store.call(store.labels(*session.key)), self._settings.max_labels
            if label not in labels and len(labels) >= most:
                message = f"session {session.name!r} has {most} copies; save over one of {', '.join(sorted(labels))}"
                raise ApiError(429, message[:1000], code="too_many_labels")
            record = session.record(label)
            await self._store.call(store.write(record, session.transcript.piece(0), is_all=True))
        return len(record.state)

    async def load(self, session: Session, label: str) -> None:
        """Go back to the copy under a label. Raises ApiError if there is none."""
        self._require_free(session)
        with _busy(session):
            found = await self._store.call(store.read(*session.key, label))
            if found is None:
                raise ApiError(404, f"label is {label!r}; expected one that was saved", code="label_not_found")
            copy = self._session_of(session.key, found)
            session.place, session.transcript, session.n_written = copy.place, copy.transcript, -1
            self._marks.forget(session.key)
            await self._write(session)

    async def _place_at(self, session: Session, position: int) -> Place:
        """Give the place after so many tokens: a mark, or what comes of reading on from one."""
        if position == session.place.n_tokens:
            return session.place
        if position == 0:
            return session.model.start
        if position > session.place.n_tokens:
            raise ApiError(400, sentence("position", position, f"at most {session.place.n_tokens}"), param="position")
        mark = self._marks.nearest(session.key, position) or session.model.start
        try:
            tokens = session.transcript.tokens(mark.n_tokens, position)
        except LookupError:
            raise ApiError(
                409,
                sentence("position", position, f"one from {session.transcript.first} on: older tokens are gone"),
                code="position_forgotten",
            ) from None
        if not tokens:
            return mark
        deadline = time.monotonic() + self._settings.turn_seconds
        turn = Turn(session.model, mark, tokens, [], mark_every=EVERY, deadline=deadline)
        async for events in self._live.run(self._engine, turn):
            for event in events:
                if isinstance(event, EndEvent):
                    if event.reason != "read":
                        raise ApiError(503, f"the tokens could not be read again: {event.reason}")
                    self._marks.add(session.key, turn.marks)
                    return event.place
        raise AssertionError("a turn without an end")

    # --- turns ---

    async def turn(self, session: Session, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Run a turn from where the session stands, and give its events; the last comes after it is on disk.

        If the caller goes away, or is far behind, the turn is cancelled, and what it read and wrote until then counts.

        Raises:
            ApiError: the session is busy.
            QueueFull: too many turns wait.
        """
        self._require_free(session, turn.place)
        line = Backlog(turn, self._engine.cancel)
        session.is_busy = True
        task = asyncio.create_task(self._follow(session, turn, line))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        is_over = False
        try:
            async for some in line:
                yield some
            is_over = True
        finally:
            if not is_over:
                self._engine.cancel(turn)

    async def _follow(self, session: Session, turn: Turn, line: Backlog) -> None:
        """See a turn through to its end, whoever listens."""
        heard: list[tuple[int, float | None, bool]] = []  # and not the events: a long turn's details take much memory
        try:
            async for events in self._live.run(self._engine, turn):
                heard += [(one.id, one.logprob, one.was_read) for one in events if isinstance(one, TokenEvent)]
                if isinstance(events[-1], EndEvent):  # a session's turn has one, which is its last event
                    events = [*events[:-1], await self._ended(session, turn, heard, events[-1])]
                line.put(events)
            line.close()
        except BaseException as error:
            line.close(error)
        finally:
            session.is_busy = False

    async def _ended(
        self, session: Session, turn: Turn, heard: list[tuple[int, float | None, bool]], end: EndEvent
    ) -> EndEvent:
        """Give the end of a turn whose result is on disk, or an error if it could not be written."""
        try:
            await self._apply(session, turn, heard, end)
        except Exception:
            LOG.exception("a session could not be written")
            message = "the session could not be written, and stays where it was before this turn"
            return EndEvent(end.choice, "error", turn.place, message=message)
        return end

    async def _apply(
        self, session: Session, turn: Turn, heard: list[tuple[int, float | None, bool]], end: EndEvent
    ) -> None:
        """Take the result of a turn, and write it."""
        session.used = time.time()
        if end.place is turn.place:  # nothing of it counts
            return
        surprises = [surprise for _, surprise, was_read in heard if was_read] or [None] * len(turn.tokens)
        for token, surprise in zip(turn.tokens, surprises):
            session.transcript.append(token, surprise, READ)
        for token, surprise, was_read in heard:
            if not was_read:
                session.transcript.append(token, surprise, WRITTEN)
        session.place = end.place
        self._marks.add(session.key, [*turn.marks, turn.place, end.place])
        await self._write(session)

    async def settle(self) -> None:
        """Wait until all turns have come to an end and are written."""
        if self._running:
            await asyncio.wait(self._running)

    # --- memory and disk ---

    def _require_free(self, session: Session, place: Place | None = None) -> None:
        """Refuse a session that has a turn, has left `place`, or was deleted or read anew since it was found."""
        _require_idle(session)
        if self._resident.get(session.key) is not session or (place or session.place) is not session.place:
            raise ApiError(409, f"session {session.name!r} has moved on meanwhile; try again", code="session_busy")

    async def _add(self, session: Session) -> None:
        owner, name = session.key
        # one at a time for an owner, too, or sessions that are opened together would all find room
        async with self._locked((owner, "")), self._locked(session.key):
            if session.key in self._resident or await self._store.call(store.read(owner, name)) is not None:
                raise ApiError(409, sentence("name", f"{name!r}, which is taken", "a new one"), code="session_exists")
            if await self._store.call(store.count(owner)) >= self._settings.max_sessions:
                raise ApiError(
                    429, f"this key has {self._settings.max_sessions} sessions; close some", code="too_many_sessions"
                )
            await self._write(session)
            self._resident[session.key] = session
        self._evict()

    async def _write(self, session: Session) -> None:
        """Write a session and what is new of its transcript; if that fails, forget it, and what is on disk counts."""
        # What is on disk goes further, or ends before what is still kept: then it is replaced.
        is_all = session.n_written < session.transcript.first or session.n_pieces >= MOST_PIECES
        piece = session.transcript.piece(0 if is_all else session.n_written)
        n_tokens = len(session.transcript)
        try:
            await self._store.call(store.write(session.record(), piece, is_all=is_all))
        except BaseException:  # or the client has hung up, and it may fail later
            if self._resident.get(session.key) is session:
                del self._resident[session.key]
            self._marks.forget(session.key)
            raise
        session.n_pieces = 1 if is_all else session.n_pieces + 1
        session.n_written = n_tokens

    async def _load(self, key: Key) -> Session:
        found = await self._store.call(store.read(*key))
        if found is None:
            raise unknown_session(key[1])
        session = self._session_of(key, found)
        self._resident[key] = session
        self._evict(but=key)
        return session

    def _session_of(self, key: Key, found: tuple[Record, list[Any]]) -> Session:
        record, pieces = found
        model = self._by_fingerprint.get(record.model)
        if model is None:
            message = (
                f"session {key[1]!r} is of a model that is not served now; expected one of {', '.join(self._models)}"
            )
            raise ApiError(409, message, code="model_not_served")
        recent = array("i")
        recent.frombytes(record.recent)
        place = Place(unpack(record.state, model.plain), tuple(recent), record.n_tokens)
        transcript = Transcript.from_pieces(pieces, self._settings.max_tokens, record.n_tokens)
        return Session(*(key, model, place, transcript, record.created, record.used), len(transcript), len(pieces))

    def _evict(self, but: Key | None = None) -> None:
        """Forget the least recently used sessions beyond the limit, all but one: they are on disk."""
        excess = len(self._resident) - self._settings.max_resident_sessions
        idle = [key for key, session in self._resident.items() if not session.is_busy and key != but]
        for key in idle[: max(0, excess)]:
            del self._resident[key]
            self._marks.forget(key)

    @contextlib.asynccontextmanager
    async def _locked(self, key: Key) -> AsyncIterator[None]:
        """One at a time for a key: two requests must not load, add or delete a session twice."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock._waiters:
                self._locks.pop(key, None)


@contextlib.contextmanager
def _busy(session: Session | None) -> Iterator[None]:
    if session is None:
        yield
        return
    session.is_busy = True
    try:
        yield
    finally:
        session.is_busy = False


def _require_idle(session: Session) -> None:
    if session.is_busy:
        message = f"session {session.name!r} has a turn that is not over; wait for it, or hang up on it"
        raise ApiError(409, message, code="session_busy", retry_after=1)
