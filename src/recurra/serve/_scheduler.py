"""Which request is served next: admission, round robin over prompts, and how much is read between two steps.

Pure logic over requests, without models, threads or HTTP.

The engine alternates between a chunk of the prompts and a step of one batch of sequences. `Pace` makes a chunk take
about as long as a step, so a prompt of any length delays the next token of a stream by at most one more step.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from recurra.checks import sentence
from recurra.serve._requests import Request

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 256
"""Tokens that are read at once: fewer cost too much per token, more delay the requests that arrive meanwhile."""

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

    def __init__(self, max_streams: int, max_queue: int) -> None:
        self._max_streams, self._max_queue = max_streams, max_queue
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        self.n_streams = 0
        """How many sequences are read or written."""
        self.pace = _Pace()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._reading

    def add(self, request: Request) -> None:
        """Queue a request that has at most `max_streams` sequences."""
        needed = self.n_streams + sum(waiting.n_sequences for waiting in self._waiting) + request.n_sequences
        if needed > self._max_streams and len(self._waiting) >= self._max_queue:
            got = f"{len(self._waiting)} requests that wait"
            raise QueueFull(sentence("the queue", got, f"at most {self._max_queue}", "try again later"))
        self._waiting.append(request)

    def admit(self) -> Iterator[Request]:
        """Admit requests in the order of their arrival; yield those that have nothing to read."""
        while self._waiting and self.n_streams + self._waiting[0].n_sequences <= self._max_streams:
            request = self._waiting.popleft()
            self.n_streams += request.n_sequences
            if request.n_left:
                self._reading.append(request)
            else:
                yield request

    def next_chunk(self, is_writing: bool) -> PrefillChunk | None:
        """Choose what to read: the request that has waited longest, beside others with at least as much to read."""
        if not self._reading:
            return None
        most = self.pace.chunk_tokens(is_writing)
        first = self._reading[0]
        length = min(first.n_left, most)
        requests = [first]
        for request in list(self._reading)[1:]:
            if (len(requests) + 1) * length > most:
                break
            if request.model is first.model and request.n_left >= length:
                requests.append(request)
        return PrefillChunk(requests, length)

    def complete(self, chunk: PrefillChunk) -> list[Request]:
        """Count a chunk as read; return the requests that are done. The others go to the end of the line."""
        done = []
        for request in chunk.requests:
            request.n_read += chunk.length
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
        return requests
