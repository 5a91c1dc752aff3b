"""What a session has read and written: tokens, their surprise, and who they are from. Only the last ones are kept."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens in a row. Surprises are log-probabilities in nats, NaN where they are unknown; origins are bytes."""

    start: int
    tokens: bytes
    surprises: bytes
    origins: bytes


READ, WRITTEN = 0, 1
"""Where a token is from."""


class Transcript:
    """The last tokens of a stream.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.first = 0
        """The position of the first token that is kept."""
        self._tokens, self._surprises, self._origins = array("i"), array("f"), array("B")

    def __len__(self) -> int:
        """The number of tokens of the stream, those included that are no longer kept."""
        return self.first + len(self._tokens)

    def append(self, token: int, surprise: float | None, origin: int) -> None:
        """Add a token."""
        self._tokens.append(token)
        self._surprises.append(float("nan") if surprise is None else surprise)
        self._origins.append(origin)
        if len(self._tokens) >= 2 * self._most:
            self._forget(len(self._tokens) - self._most)

    def _forget(self, count: int) -> None:
        del self._tokens[:count], self._surprises[:count], self._origins[:count]
        self.first += count

    def tokens(self, start: int, end: int) -> list[int]:
        """Give the tokens from `start` to before `end`. Raises LookupError if they are not kept."""
        if not self.first <= start <= end <= len(self):
            raise LookupError(f"positions {start} to {end} of tokens {self.first} to {len(self)}")
        return self._tokens[start - self.first : end - self.first].tolist()

    def entries(self, start: int, end: int) -> Sequence[tuple[int, float, int]]:
        """Give tokens with surprise and origin; errors as `tokens`."""
        self.tokens(start, start if start > end else end)
        part = slice(start - self.first, end - self.first)
        return list(zip(self._tokens[part], self._surprises[part], self._origins[part]))

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on, which may be all that are kept. Raises LookupError if `end` is beyond."""
        if not 0 <= end <= len(self):
            raise LookupError(f"position {end} of {len(self)} tokens")
        self.first = min(self.first, end)
        n = end - self.first
        del self._tokens[n:], self._surprises[n:], self._origins[n:]

    def copy(self, end: int) -> "Transcript":
        """Give the transcript up to `end`. Raises LookupError as `cut`."""
        twin = Transcript(self._most)
        twin.first = self.first
        twin._tokens, twin._surprises, twin._origins = self._tokens[:], self._surprises[:], self._origins[:]
        twin.cut(end)
        return twin

    def piece(self, start: int) -> Piece:
        """Give what comes from `start` on, or from the first token that is kept."""
        start = max(start, self.first)
        n = start - self.first
        return Piece(start, self._tokens[n:].tobytes(), self._surprises[n:].tobytes(), self._origins[n:].tobytes())

    @classmethod
    def from_pieces(cls, pieces: Sequence[Piece], most: int, end: int) -> "Transcript":
        """Put pieces together that follow one another. Those before a gap, as older versions left them, are dropped.

        Args:
            pieces: in their order; none if all tokens are forgotten.
            most: tokens to keep.
            end: where the stream stands. Pieces that end elsewhere are not its own, and are dropped.
        """
        made = cls(most)
        made.first = pieces[0].start if pieces else 0
        for piece in pieces:
            if piece.start != len(made):
                made._forget(len(made._tokens))
                made.first = piece.start
            made._tokens.frombytes(piece.tokens)
            made._surprises.frombytes(piece.surprises)
            made._origins.frombytes(piece.origins)
        if len(made._tokens) > most:
            made._forget(len(made._tokens) - most)
        if len(made) != end:
            made._forget(len(made._tokens))
            made.first = end
        return made
