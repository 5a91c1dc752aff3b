"""Who is served next: admission, round robin over the prompts that are read, and how much is read between two steps.

Pure logic over turns, without models, threads or HTTP.

The engine alternates: a piece of prompts, then one step of a batch that writes. `Pace` makes a piece take about as long
as a step, so a prompt of any length delays the next token of a stream by one more step at most, whatever else is read.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from recurra.checks import sentence
from recurra.serving.requests import Turn

SHORTEST_PIECE, LONGEST_PIECE = 16, 256
"""Tokens that are read at once: fewer cost too much a token, more delay those who come meanwhile."""

_SMOOTHING = 0.2


class QueueFull(ValueError):
    """There is no room for another request now."""


class Piece(NamedTuple):
    """What one call reads: the next `length` tokens of each of these turns, all of one model."""

    turns: list[Turn]
    length: int


class Pace:
    """How many tokens a piece may have, from how long pieces and steps have taken."""

    def __init__(self) -> None:
        self._token_seconds = self._step_seconds = 0.0

    def note_piece(self, n_tokens: int, seconds: float) -> None:
        """Learn how long a piece took."""
        self._token_seconds = _smoothed(self._token_seconds, seconds / n_tokens)

    def note_step(self, seconds: float) -> None:
        """Learn how long a step of a batch took."""
        self._step_seconds = _smoothed(self._step_seconds, seconds)

    def tokens(self, somebody_writes: bool) -> int:
        """Give the number of tokens that the next piece may have."""
        if not somebody_writes:
            return LONGEST_PIECE
        if not self._token_seconds:
            return SHORTEST_PIECE
        return max(SHORTEST_PIECE, min(LONGEST_PIECE, int(self._step_seconds / self._token_seconds)))


def _smoothed(old: float, new: float) -> float:
    return new if not old else old + _SMOOTHING * (new - old)


class Scheduler:
    """Turns that wait, and turns whose prompts are read; turns that write are in batches elsewhere.

    Args:
        max_streams: continuations that are read or written at the same time.
        max_queue: turns that wait.
    """

    def __init__(self, max_streams: int, max_queue: int) -> None:
        self._max_streams, self._max_queue = max_streams, max_queue
        self._waiting: deque[Turn] = deque()
        self._reading: deque[Turn] = deque()
        self._n_streams = 0
        self.pace = Pace()

    @property
    def n_waiting(self) -> int:
        """How many turns wait."""
        return len(self._waiting)

    @property
    def n_streams(self) -> int:
        """How many continuations are read or written."""
        return self._n_streams

    def add(self, turn: Turn) -> None:
        """Queue a turn, which takes no more places than there are.

        Raises:
            QueueFull: as many as allowed wait already, and it would wait, too.
        """
        wanted = self._n_streams + sum(map(n_rows, self._waiting)) + n_rows(turn)
        if wanted > self._max_streams and len(self._waiting) >= self._max_queue:
            came = f"{len(self._waiting)} requests that wait"
            raise QueueFull(sentence("the queue", came, f"at most {self._max_queue}", "try again later"))
        self._waiting.append(turn)

    def admit(self) -> Iterator[Turn]:
        """Give places to turns in the order in which they came; give out those that have nothing to read."""
        while self._waiting and self._n_streams + n_rows(self._waiting[0]) <= self._max_streams:
            turn = self._waiting.popleft()
            self._n_streams += n_rows(turn)
            if turn.n_left:
                self._reading.append(turn)
            else:
                yield turn

    def next_piece(self, somebody_writes: bool) -> Piece | None:
        """Choose what to read: the turn that has waited longest, beside others with as much to read."""
        if not self._reading:
            return None
        room = self.pace.tokens(somebody_writes)
        first = self._reading[0]
        length = min(first.n_left, room)
        turns = [first]
        for turn in list(self._reading)[1:]:
            if (len(turns) + 1) * length > room:
                break
            if turn.model is first.model and turn.n_left >= length:
                turns.append(turn)
        return Piece(turns, length)

    def has_read(self, piece: Piece) -> list[Turn]:
        """Count a piece as read; give the turns that have read everything. The others go to the end of the line."""
        done = []
        for turn in piece.turns:
            turn.n_read += piece.length
            self._reading.remove(turn)
            if turn.n_left:
                self._reading.append(turn)
            else:
                done.append(turn)
        return done

    def release(self, n_streams: int) -> None:
        """Give places back."""
        self._n_streams -= n_streams

    def drop(self, now: float) -> list[tuple[Turn, bool]]:
        """Take out turns that were cancelled or are late, before they write; tell which of them had a place."""
        dropped = []
        for line, has_place in ((self._waiting, False), (self._reading, True)):
            for turn in [turn for turn in line if turn.is_cancelled or now > turn.deadline]:
                line.remove(turn)
                dropped.append((turn, has_place))
        return dropped

    def remove(self, turn: Turn) -> None:
        """Take out a turn that reads."""
        self._reading.remove(turn)

    def take_all(self) -> list[tuple[Turn, bool]]:
        """Take out everything, as when the server stops."""
        turns = [(turn, False) for turn in self._waiting] + [(turn, True) for turn in self._reading]
        self._waiting.clear()
        self._reading.clear()
        return turns

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is read."""
        return not self._waiting and not self._reading


def n_rows(turn: Turn) -> int:
    """How many places a turn takes."""
    return max(1, len(turn.configs))
