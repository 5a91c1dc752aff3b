"""What a turn tells about the tokens that it reads: their surprise, what the model answers after each, its gates."""

from typing import Any

import torch
from torch import Tensor

from recurra.serving.details import gates_of
from recurra.serving.shares import shares
from recurra.serving.turns import Share, TokenEvent, Turn


class ReadReport:
    """Makes the events of a turn's tokens as they are read, piece by piece.

    A token's surprise comes from the logits in front of it, everything else from reading it. So the logits after the
    last token of a piece are kept for the next one.

    Args:
        turn: reads at least one token.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._number = 0  # of the token that is told next
        self._before: Tensor | None = None
        self._text = turn.model.pieces(turn.place.recent)

    def piece(self, read: list[int], hidden: Tensor, state: Any) -> list[TokenEvent]:
        """Tell about a piece of `turn.to_read`: the tokens, what the head reads after each, the state before them."""
        turn, wanted = self._turn, self._turn.wanted
        logits = turn.model.head(hidden) if wanted.before or wanted.answers else None
        gates = gates_of(turn.model, read, state, wanted.gates) if wanted.gates else None
        events = []
        for step in range(len(read)):
            after = None if logits is None else logits[step]
            if turn.n_read + step >= len(turn.place.unread):  # the stream's own last token was told when it came
                events.append(self._told(after, None if gates is None else gates[step]))
            self._before = after
        return events

    def last(self, state: Any) -> TokenEvent:
        """Tell about the last token, which the stream does not read yet, from the state before it."""
        turn, token = self._turn, self._turn.tokens[-1]
        after, gates = None, None
        if turn.wanted.answers:
            after = turn.model.head(turn.model.read(torch.tensor([[token]]), state)[0])[0, -1]
        if turn.wanted.gates:
            (gates,) = gates_of(turn.model, [token], state, turn.wanted.gates)
        return self._told(after, gates)

    def _told(self, after: Tensor | None, gates: Any) -> TokenEvent:
        turn, wanted = self._turn, self._turn.wanted
        token = turn.tokens[self._number]
        self._number += 1
        logprob: float | None = None
        alternatives: tuple[Share, ...] = ()
        if wanted.before and self._before is not None and turn.model.predicts_tokens:
            logprob, alternatives = shares(self._before, token, wanted.alternatives)
        answers = shares(after, None, wanted.answers)[1] if wanted.answers and after is not None else ()
        return TokenEvent(0, token, self._text(token), True, logprob, alternatives, answers, gates)
