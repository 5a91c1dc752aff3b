"""Which requests wait, which are read, and how much of them at once. It has no model, clock or thread."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from recurra.checks import sentence
from recurra.decoding.linear import MOST_VECTORS
from recurra.serve._prefixes import PrefixCache
from recurra.serve._requests import LONGEST_CHUNK, SHORTEST_CHUNK, Request

_BACKGROUND_CHUNK = 64
_MOST_IN_BACKGROUND = 64
"""Requests that wait to be read in the background; of more, the oldest are forgotten."""
_SMOOTHING = 0.2


class QueueFull(ValueError):
    """The queue takes no more requests now."""


class PrefillChunk(NamedTuple):
    """The next `length` tokens of each of these requests, all of one model, which one call reads."""

    requests: list[Request]
    length: int

    @property
    def n_tokens(self) -> int:
        return len(self.requests) * self.length


class _Pace:
    """How many tokens a chunk may have, from how long chunks and steps have taken."""

    def __init__(self) -> None:
        self._token_seconds = self._step_seconds = 0.0

    def note_chunk(self, n_tokens: int, seconds: float) -> None:
        self._token_seconds = _smoothed(self._token_seconds, seconds / n_tokens)

    def note_step(self, seconds: float) -> None:
        self._step_seconds = _smoothed(self._step_seconds, seconds)

    def chunk_tokens(self, is_writing: bool) -> int:
        """Return the number of tokens that the next chunk may have, while sequences are written or not."""
        if not is_writing:
            return LONGEST_CHUNK
        if not self._token_seconds:
            return SHORTEST_CHUNK
        return max(SHORTEST_CHUNK, min(LONGEST_CHUNK, int(self._step_seconds / self._token_seconds)))


def _smoothed(old: float, new: float) -> float:
    return new if not old else old + _SMOOTHING * (new - old)


class Scheduler:
    """Requests that wait, and requests whose prompts are read. Sequences that are written are the engine's."""

    def __init__(self, max_streams: int, max_queue: int, prefixes: PrefixCache | None = None) -> None:
        self._max_streams, self._max_queue, self.prefixes = max_streams, max_queue, prefixes
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        self._background: deque[Request] = deque(maxlen=_MOST_IN_BACKGROUND)
        self.n_streams = 0
        """How many sequences are read or written."""
        self.pace = _Pace()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._reading and not self._background

    def add(self, request: Request) -> None:
        """Queue a request that has at most `max_streams` sequences."""
        needed = self.n_streams + sum(waiting.n_sequences for waiting in self._waiting) + request.n_sequences
        if needed > self._max_streams and len(self._waiting) >= self._max_queue:
            got = f"{len(self._waiting)} requests that wait"
            raise QueueFull(sentence("the queue", got, f"at most {self._max_queue}", "try again later"))
        self._waiting.append(request)

    def add_background(self, request: Request) -> None:
        self._background.append(request)

    def admit(self, is_writing: bool = False) -> Iterator[Request]:
        """Admit requests in the order of their arrival; yield those that have nothing to read."""
        if self._background and not is_writing and not self._waiting and not self._reading:
            self._waiting.append(self._background.popleft())
        admitted = [one for one in self._reading if one.waits_for is not None and not one.is_waiting]
        for request in admitted:
            self._reading.remove(request)
        while self._waiting and self.n_streams + self._waiting[0].n_sequences <= self._max_streams:
            admitted.append(self._waiting.popleft())
            self.n_streams += admitted[-1].n_sequences
        for request in admitted:
            if self.prefixes is not None and request.takes_prefix:
                self.prefixes.claim(request)
            if request.n_left:
                self._reading.append(request)
            else:
                yield request

    def next_chunk(self, is_writing: bool) -> PrefillChunk | None:
        """Choose what to read: the request that has waited longest, beside others with at least as much to read."""
        reading = [request for request in self._reading if not request.is_waiting]
        if not reading:
            return None
        first, most = reading[0], self.pace.chunk_tokens(is_writing)
        length = _chunk_length(first.n_next, min(most, _BACKGROUND_CHUNK) if first.is_background else most)
        if length < SHORTEST_CHUNK:
            most = min(most, MOST_VECTORS)  # so that the products are those of one prompt alone
        requests = [first]
        for request in reading[1:]:
            if (len(requests) + 1) * length > most:
                break
            if _join(first, request, length):
                requests.append(request)
        return PrefillChunk(requests, length)

    def complete(self, chunk: PrefillChunk) -> list[Request]:
        """Count a chunk as read; return the requests that are done. The others go to the end of the line."""
        done = []
        for request in chunk.requests:
            request.n_read += chunk.length
            if self.prefixes is not None:
                self.prefixes.take(request)
            self._reading.remove(request)
            if request.n_left:
                self._reading.append(request)
            else:
                done.append(request)
        return done

    def release(self, n_streams: int) -> None:
        self.n_streams -= n_streams

    def remove(self, request: Request) -> None:
        self._reading.remove(request)

    def drop(self, now: float) -> list[tuple[Request, bool]]:
        """Take out requests that were cancelled or are late; the flag says whether they had been admitted."""
        dropped = []
        for line, is_admitted in ((self._waiting, False), (self._reading, True)):
            for request in [request for request in line if request.interruption(now)]:
                line.remove(request)
                dropped.append((request, is_admitted))
        return dropped

    def drop_all(self) -> list[tuple[Request, bool]]:
        requests = [(request, False) for request in self._waiting] + [(request, True) for request in self._reading]
        self._waiting.clear()
        self._reading.clear()
        self._background.clear()
        return requests


def _chunk_length(n_next: int, most: int) -> int:
    """Return how many of the next tokens to read, about `most`: neither they nor the rest may be too few."""
    if n_next <= most or n_next < 2 * SHORTEST_CHUNK:
        return n_next
    return max(SHORTEST_CHUNK, min(most, n_next - SHORTEST_CHUNK))


def _join(first: Request, other: Request, length: int) -> bool:
    """Whether two requests can read so many tokens side by side; beginnings and ends that are short stay apart."""
    is_alike = length >= SHORTEST_CHUNK or bool(first.n_read) == bool(other.n_read)
    return other.model is first.model and is_alike and _chunk_length(other.n_next, length) == length
