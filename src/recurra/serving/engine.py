"""The engine: one thread that reads prompts and writes tokens for all streams, a step at a time."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from recurra.checks import require_at_least
from recurra.generation.choosing import choose
from recurra.serving.counters import Counters
from recurra.serving.details import gates_of
from recurra.serving.read_report import ReadReport
from recurra.serving.row_batch import MOST_ROWS, RowBatch
from recurra.serving.scheduler import Piece, Scheduler, n_rows
from recurra.serving.shares import shares
from recurra.serving.turns import EndEvent, Event, Row, TokenEvent, Turn
from recurra.state import batch, split

LOG = logging.getLogger("recurra.serving")

FAILED = "the model failed on this turn; the server's log says why"

Deliver: TypeAlias = Callable[[dict[Turn, list[Event]]], None]


class Engine:
    """Runs turns of any number of streams. `submit`, `cancel` and `stop` may be called from any thread.

    Args:
        deliver: called on the engine's thread after every round, with the events of each turn.
        max_streams: continuations that are read or written at the same time.
        max_queue: turns that wait; more are refused.
        threads: for torch and the kernels; None leaves it to torch.

    Raises:
        ValueError: `threads` is below 1.
    """

    def __init__(
        self, deliver: Deliver, max_streams: int = 1024, max_queue: int = 1024, threads: int | None = None
    ) -> None:
        if threads is not None:
            require_at_least(1, threads=threads)
        self.scheduler = Scheduler(max_streams, max_queue)
        self.counters = Counters()
        self._deliver, self._threads = deliver, threads
        self._batches: list[RowBatch] = []
        self._states: dict[Turn, Any] = {}  # of turns that read: the state after what they have read
        self._reports: dict[Turn, ReadReport] = {}
        self._outbox: dict[Turn, list[Event]] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recurra-engine", daemon=True)

    # --- from any thread ---

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, turn: Turn) -> None:
        """Queue a turn. Raises QueueFull if too many wait."""
        with self._lock:
            self.scheduler.add(turn)
        self._wake.put(None)

    def cancel(self, turn: Turn) -> None:
        """End a turn early; it still gets its end events."""
        turn.is_cancelled = True
        self._wake.put(None)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._batches) or not self.scheduler.is_idle

    @property
    def n_writing(self) -> int:
        """How many continuations are written."""
        return sum(len(one.rows) for one in self._batches)

    def stop(self) -> None:
        """End all turns, and the thread; return when it has ended."""
        self._stopping.set()
        self._wake.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ---

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._stopping.is_set():
                self._wait()
                self.round()
            self._end_all()

    def _wait(self) -> None:
        while not self.is_busy and not self._stopping.is_set():
            self._wake.get()
        while not self._wake.empty():
            self._wake.get()

    def round(self) -> None:
        """Read a piece of prompts, run a step of one batch, and hand out the events of both."""
        with self._lock:
            dropped = self.scheduler.drop(time.monotonic())
            ready = list(self.scheduler.admit())
            piece = self.scheduler.next_piece(bool(self._batches))
        for turn, has_place in dropped:
            self._drop(turn, has_place)
        for turn in ready:
            self._has_read(turn, turn.place.state)
        if piece is not None:
            self._read(piece)
        if self._batches:
            turn_of = self._batches.pop(0)
            self._batches.append(turn_of)
            self._write(turn_of)
            self._tidy()
        self._send()

    def _send(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, {}
            self._deliver(events)

    def _put(self, turn: Turn, *events: Event) -> None:
        self._outbox.setdefault(turn, []).extend(events)

    # --- reading ---

    def _read(self, piece: Piece) -> None:
        start = time.perf_counter()
        try:
            self._read_piece(piece)
        except Exception:  # one turn must not end the server
            LOG.exception("reading failed")
            with self._lock:
                for turn in piece.turns:
                    self.scheduler.remove(turn)
            for turn in piece.turns:
                self._drop(turn, True, "error", FAILED)
            return
        with self._lock:
            self.scheduler.pace.note_piece(len(piece.turns) * piece.length, time.perf_counter() - start)
            done = self.scheduler.has_read(piece)
        self.counters.read += len(piece.turns) * piece.length
        for turn in done:
            self._has_read(turn, self._states.pop(turn))

    def _read_piece(self, piece: Piece) -> None:
        model = piece.turns[0].model
        begun = [self._states.get(turn, turn.place.state) for turn in piece.turns]
        texts = [turn.to_read[turn.n_read : turn.n_read + piece.length] for turn in piece.turns]
        hidden, state = model.read(torch.tensor(texts), batch(begun))
        for number, (turn, after) in enumerate(zip(piece.turns, split(state))):
            if turn.reports:
                self._put(turn, *self._report(turn).piece(texts[number], hidden[number], begun[number]))
            self._states[turn] = after
            n_new = turn.n_read + piece.length + 1 - len(turn.place.unread)  # the last one is not read yet
            if turn.mark_every and 0 < n_new <= len(turn.tokens):
                turn.mark(turn.place.after(turn.tokens[:n_new], after))

    def _report(self, turn: Turn) -> ReadReport:
        if turn not in self._reports:
            self._reports[turn] = ReadReport(turn)
        return self._reports[turn]

    def _has_read(self, turn: Turn, state: Any) -> None:
        """A turn has read all but its last token: it ends, or begins to write."""
        try:
            if turn.reports:
                self._put(turn, self._report(turn).last(state))
            place = turn.place.after(turn.tokens, state)
            rows = [Row(turn, choice, place) for choice in range(len(turn.configs))]
        except Exception:
            LOG.exception("reading failed")
            self._drop(turn, True, "error", FAILED)
            return
        self._reports.pop(turn, None)
        if not rows:
            self._put(turn, EndEvent(0, "read", place))
            self._release(1)
        for row in rows:
            self._batch_for(turn).join([row], [place.state])

    # --- writing ---

    def _batch_for(self, turn: Turn) -> RowBatch:
        """The fullest batch of its model that has room."""
        with_room = [one for one in self._batches if one.model is turn.model and len(one.rows) < MOST_ROWS]
        if not with_room:
            with_room = [RowBatch(turn.model)]
            self._batches.extend(with_room)
        return max(with_room, key=lambda one: len(one.rows))

    def _write(self, rows: RowBatch) -> None:
        self._leave(rows, {place: reason for place, row in enumerate(rows.rows) if (reason := _cut_short(row.turn))})
        if not rows.rows:
            return
        start = time.perf_counter()
        had = [row.n_tokens for row in rows.rows]
        try:
            logits = rows.step()
            failed = self._choose(rows, logits)
        except Exception:
            LOG.exception("writing failed")
            undone = [place for place, row in enumerate(rows.rows) if row.n_tokens == had[place]]
            self._leave(rows, dict.fromkeys(range(len(rows.rows)), "error"), FAILED, undone)
            return
        seconds = time.perf_counter() - start
        self.scheduler.pace.note_step(seconds)
        self.counters.step_seconds.append(seconds)
        self.counters.steps += 1
        self.counters.written += len(rows.rows) - len(failed)
        ended = {place: row.reason for place, row in enumerate(rows.rows) if row.reason}
        message = "with these settings there is no token to choose"
        self._leave(rows, ended | dict.fromkeys(failed, "error"), message, failed)

    def _choose(self, rows: RowBatch, logits: torch.Tensor) -> list[int]:
        """Write a token of every row; give the places of those that have none to choose."""
        now, failed = time.monotonic(), []
        tokens = choose(logits, [row.generation.row(row.recent) for row in rows.rows])
        for place, (row, token) in enumerate(zip(rows.rows, tokens)):
            wanted, turn = row.turn.wanted, row.turn
            if isinstance(token, ValueError):
                LOG.error("no token to choose: %s", token)
                failed.append(place)
                continue
            if row.generation.n_tokens == 0:
                self.counters.first_token.append(now - turn.submitted)
            logprob, alternatives = shares(logits[place], token, wanted.alternatives) if wanted.before else (None, ())
            gates = None
            if wanted.gates:
                (gates,) = gates_of(turn.model, [token], rows.state_of(place), wanted.gates)
            text = row.take(token)  # last of all: a token counts if it is told
            self._put(turn, TokenEvent(row.choice, token, text, False, logprob, alternatives, (), gates))
            if turn.mark_every and row.n_tokens % turn.mark_every == 0:
                turn.mark(row.place(rows.state_of(place)))
        return failed

    def _leave(self, rows: RowBatch, reasons: dict[int, str], message: str = "", undone: Collection[int] = ()) -> None:
        """Let rows leave a batch, each with its reason; the message is for errors, and `undone` have read a token
        without writing one after it."""
        leaving = [rows.rows[place] for place in reasons]
        for row, reason, state in zip(leaving, reasons.values(), rows.leave(list(reasons), undone=undone)):
            said = message if reason == "error" else ""
            self._put(row.turn, EndEvent(row.choice, reason, row.place(state), row.rest(), said))
            self._release(1, reason=reason)

    def _tidy(self) -> None:
        """Drop empty batches, and merge two of one model that fit in one."""
        self._batches = [one for one in self._batches if one.rows]
        smallest = sorted(self._batches, key=lambda one: len(one.rows))
        for one, other in pairwise(smallest):
            if one.model is other.model and len(one.rows) + len(other.rows) <= MOST_ROWS:
                other.take_over(one)
                self._batches.remove(one)
                return

    # --- ends ---

    def _drop(self, turn: Turn, has_place: bool, reason: str | None = None, message: str = "") -> None:
        """End a turn that has not written: nothing of it counts."""
        self._states.pop(turn, None)
        self._reports.pop(turn, None)
        reason = reason or _cut_short(turn) or "cancelled"
        for choice in range(n_rows(turn)):
            self._put(turn, EndEvent(choice, reason, turn.place, message=message))
        self._release(n_rows(turn) if has_place else 0, n_rows(turn), reason)

    def _release(self, n_streams: int, n_ended: int = 1, reason: str = "") -> None:
        with self._lock:
            self.scheduler.release(n_streams)
        self.counters.ended += n_ended
        self.counters.failed += n_ended * (reason == "error")

    def _end_all(self) -> None:
        with self._lock:
            turns = self.scheduler.take_all()
        for turn, has_place in turns:
            self._drop(turn, has_place, "cancelled")
        for rows in self._batches:
            self._leave(rows, dict.fromkeys(range(len(rows.rows)), "cancelled"))
        self._batches = []
        self._send()


def _cut_short(turn: Turn) -> str | None:
    """Why a turn must end now."""
    if turn.is_cancelled:
        return "cancelled"
    return "timeout" if time.monotonic() > turn.deadline else None
