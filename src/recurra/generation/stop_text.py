"""Ending a text where a given one appears in it."""

from collections.abc import Sequence


class StopText:
    """Passes a text on, piece by piece, up to the first appearance of one of `stops`, which is left out.

    What may be the beginning of one is held back until that is decided.

    Raises:
        ValueError: one of `stops` is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a text to stop at is empty; expected at least one letter")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Give what may be passed on now; `found` tells whether that was the last."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(text) - self._possible_beginning(text)
        self._held = "" if places else text[end:]
        return text[:end]

    def flush(self) -> str:
        """Give what is still held back when the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
