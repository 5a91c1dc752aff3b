"""From tokens to text as they come, without ever giving out half a letter."""

from collections.abc import Sequence

from recurra.data import TextEncoder

_WINDOW = 16
_UNDECIDED = "\ufffd"  # what a tokenizer makes of bytes that are no letter, or not yet
_LONGEST = 3  # bytes of a letter that may be there while it is not complete


class TextPieces:
    """The text of a stream of tokens, piece by piece; the pieces together are what all tokens decode to.

    A token of a byte pair encoding may end in the middle of a letter: it is then held back until the letter is
    complete. Only the last few tokens are kept, however long the stream is.

    Args:
        tokenizer: decodes.
        before: the tokens before the first piece; with words, one of them puts a blank between.
    """

    def __init__(self, tokenizer: TextEncoder, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(before)[-_WINDOW:]

    def add(self, token: int) -> str:
        """Give the text that the next token settles; often "" inside of a letter of several bytes."""
        settled = _settled(self._text())
        self._window.append(token)
        piece = _settled(self._text())[len(settled) :]
        # The start of the window may fall into a letter. That is no harm: where a letter begins can be told from its
        # own bytes, so the end of the window reads the same.
        del self._window[:-_WINDOW]
        return piece

    def flush(self) -> str:
        """Give what is still held back at the end: a letter that was never completed, as U+FFFD."""
        text = self._text()
        return text[len(_settled(text)) :]

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)


def _settled(text: str) -> str:
    """The text but for an end that the next token may change."""
    n_undecided = len(text) - len(text.rstrip(_UNDECIDED))
    return text[: len(text) - min(n_undecided, _LONGEST)]
