"""Which requests wait, which are read, and how much of them at once. It has no model, clock or thread."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from recurra.checks import sentence
from recurra.decoding.linear import MOST_VECTORS
from recurra.serve._prefixes import PrefixCache
from recurra.serve._requests import LONGEST_CHUNK, SHORTEST_CHUNK, Request

_BACKGROUND_CHUNK = 64
_MOST_IN_BACKGROUND = 64
"""Requests that wait to be read in the background; of more, the oldest are forgotten."""
_SMOOTHING = 0.2
_STEPS_OF_OTHERS = 8
"""Steps that a chunk may take if as many other requests wait to be read as sequences are written."""


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

    def chunk_tokens(self, n_steps: float) -> int:
        """Return the number of tokens that the next chunk may have, to take as long as so many steps."""
        if not self._token_seconds:
            return SHORTEST_CHUNK
        return max(SHORTEST_CHUNK, int(min(LONGEST_CHUNK, n_steps * self._step_seconds / self._token_seconds)))


def _smoothed(old: float, new: float) -> float:
    return new if not old else old + _SMOOTHING * (new - old)


class Turns:
    """Owners take turns: the one who was served longest ago is next, however many requests each has."""

    def __init__(self) -> None:
        self._served: dict[str | None, int] = {}
        self._n_served = 0

    def last(self, owners: Iterable[str | None]) -> int:
        """Return when those of these owners who have waited longest were served."""
        return min(self._served.get(owner, 0) for owner in owners)

    def serve(self, owners: Iterable[str | None]) -> None:
        self._n_served += 1
        self._served |= dict.fromkeys(owners, self._n_served)


class _Limits(NamedTuple):
    """How many sequences may be read or written, and how many requests may wait: of one owner, or of all."""

    streams: int
    queue: int

    def require_room(self, n_streams: int, waiting: Collection[Request], request: Request) -> None:
        needed = n_streams + sum(one.n_sequences for one in waiting) + request.n_sequences
        if needed > self.streams and len(waiting) >= self.queue:
            got = f"{len(waiting)} requests that wait"
            raise QueueFull(sentence("the queue", got, f"at most {self.queue}", "try again later"))


class Scheduler:
    """Requests that wait, and requests whose prompts are read. Sequences that are written are the engine's.

    `share_of` gives what one owner may have of the streams, and of the queue.
    """

    def __init__(
        self,
        max_streams: int,
        max_queue: int,
        prefixes: PrefixCache | None = None,
        share_of: Callable[[int], int] = int,  # all
    ) -> None:
        self._all = _Limits(max_streams, max_queue)
        self._each = _Limits(share_of(max_streams), share_of(max_queue))
        self.prefixes = prefixes
        self._waiting: dict[str | None, deque[Request]] = {}  # by owner, without empty ones
        self._reading: deque[Request] = deque()
        self._background: deque[Request] = deque(maxlen=_MOST_IN_BACKGROUND)
        self._streams: Counter[str | None] = Counter()  # sequences that are read or written, by owner
        self._turns = Turns()
        self.pace = _Pace()

    @property
    def n_streams(self) -> int:
        """How many sequences are read or written."""
        return self._streams.total()

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._reading and not self._background

    def add(self, request: Request) -> None:
        """Queue a request that has at most as many sequences as one owner may have."""
        own = self._waiting.get(request.owner, ())
        self._each.require_room(self._streams[request.owner], own, request)
        self._all.require_room(self.n_streams, [one for line in self._waiting.values() for one in line], request)
        self._waiting.setdefault(request.owner, deque()).append(request)

    def add_background(self, request: Request) -> None:
        self._background.append(request)

    def admit(self, is_writing: bool = False) -> Iterator[Request]:
        """Admit requests, those of an owner in the order of their arrival; yield those that have nothing to read."""
        if self._background and not is_writing and not self._waiting and not self._reading:
            self.add(self._background.popleft())
        admitted = [one for one in self._reading if one.waits_for is not None and not one.is_waiting]
        for request in admitted:
            self._reading.remove(request)
        while (oldest := self._next_waiting()) is not None:
            self._take_waiting(oldest)
            self._streams[oldest.owner] += oldest.n_sequences
            admitted.append(oldest)
        for request in admitted:
            if self.prefixes is not None and request.takes_prefix:
                self.prefixes.claim(request)
            if request.n_left:
                self._reading.append(request)
            else:
                yield request

    def _next_waiting(self) -> Request | None:
        """Return the oldest request of the owner with the fewest streams, if there is room for it."""
        oldest = [line[0] for line in self._waiting.values()]
        allowed = [one for one in oldest if self._streams[one.owner] + one.n_sequences <= self._each.streams]
        first = min(allowed, key=lambda one: self._streams[one.owner], default=None)
        return first if first is not None and self.n_streams + first.n_sequences <= self._all.streams else None

    def _take_waiting(self, request: Request) -> None:
        line = self._waiting[request.owner]
        line.remove(request)
        if not line:
            del self._waiting[request.owner]

    def next_chunk(self, is_writing: bool) -> PrefillChunk | None:
        """Choose what to read: the request that has waited longest, of the owner whose turn it is, beside others with
        at least as much to read."""
        reading = [request for request in self._reading if not request.is_waiting]
        if not reading:
            return None
        first = min(reading, key=lambda request: self._turns.last([request.owner]))
        reading.remove(first)
        most = self.pace.chunk_tokens(self._share(len(reading) + 1)) if is_writing else LONGEST_CHUNK
        length = _chunk_length(first.n_next, min(most, _BACKGROUND_CHUNK) if first.is_background else most)
        if length < SHORTEST_CHUNK:
            most = min(most, MOST_VECTORS)  # so that the products are those of one prompt alone
        requests = [first]
        for request in reading:
            if (len(requests) + 1) * length > most:
                break
            if _join(first, request, length):
                requests.append(request)
        self._turns.serve(request.owner for request in requests)
        return PrefillChunk(requests, length)

    def _share(self, n_reading: int) -> float:
        """Return how many steps a chunk may take beside sequences that are written.

        It is one. If all are one owner's, so that nobody else's tokens are late, it grows with the number of other
        requests to read for each of these sequences.
        """
        n_owners, n_to_read = sum(n > 0 for n in self._streams.values()), sum(one.n_sequences for one in self._reading)
        n_writing = max(1, self.n_streams - n_to_read)
        return max(1.0, _STEPS_OF_OTHERS * (n_reading - 1) / n_writing) if n_owners < 2 else 1.0

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

    def release(self, owner: str | None, n_streams: int) -> None:
        self._streams[owner] -= n_streams

    def remove(self, request: Request) -> None:
        self._reading.remove(request)

    def drop(self, is_over: Callable[[Request], object]) -> list[tuple[Request, bool]]:
        """Remove and return the requests that are over; the flag says whether one had been admitted."""
        waiting = [request for line in self._waiting.values() for request in line if is_over(request)]
        for request in waiting:
            self._take_waiting(request)
        reading = [request for request in self._reading if is_over(request)]
        for request in reading:
            self._reading.remove(request)
        for request in [request for request in self._background if is_over(request)]:
            self._background.remove(request)
        return [(request, False) for request in waiting] + [(request, True) for request in reading]


def _chunk_length(n_next: int, most: int) -> int:
    """Return how many of the next tokens to read, about `most`: neither they nor the rest may be too few."""
    if n_next <= most or n_next < 2 * SHORTEST_CHUNK:
        return n_next
    return max(SHORTEST_CHUNK, min(most, n_next - SHORTEST_CHUNK))


def _join(first: Request, other: Request, length: int) -> bool:
    """Whether two requests can read so many tokens side by side; beginnings and ends that are short stay apart."""
    is_alike = length >= SHORTEST_CHUNK or bool(first.n_read) == bool(other.n_read)
    return other.model is first.model and is_alike and _chunk_length(other.n_next, length) == length
