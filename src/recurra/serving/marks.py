"""States along transcripts, to go back to: a bounded number for each session, spread evenly, and of bytes in all."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from recurra.serving.place import Place
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
