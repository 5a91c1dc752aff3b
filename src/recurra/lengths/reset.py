"""Rows that start anew inside of a call: `reset` (B, L) is True at the first step of each new sequence.

Outputs, last state and gradients are those of cutting every row there and starting the next piece from None. So a row
can hold the end of one episode, whole ones, and the beginning of another: its first piece continues the state that
comes in, and its last one leaves the state that comes out.

`run_resets` does this for any module that takes `mask` and `cu_seqlens`: what lies before each row's first reset is a
padded batch, and what comes after is packed sequences. Nothing passes from one sequence to another, not even NaN. Scans
put transitions of 0 at the resets instead (`cut_transitions`).
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence
from recurra.lengths.padded import check_lengths
from recurra.state import batch, select, split


def check_reset(x: Tensor, reset: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse a reset that does not fit x, (B, L, ...).

    Raises:
        TypeError: it is not a boolean tensor.
        ValueError: it does not have x's shape (B, L), or there are borders of packed sequences too.
    """
    require_tensor("reset", reset)
    if reset.dtype != torch.bool:
        raise TypeError(sentence("reset", kind_of(reset), "booleans, True where a row starts anew", "use reset.bool()"))
    if reset.shape != x.shape[:2]:
        expected = f"(B, L) = {tuple(x.shape[:2])}, as the input"
        raise ValueError(sentence("reset", f"of shape {tuple(reset.shape)}", expected))
    if cu_seqlens is not None:
        raise ValueError(
            "reset and cu_seqlens are both given; expected one: packed sequences start anew at each border"
        )


def cut_transitions(
    a: Tensor, reset: Bool[Tensor, "B L"], n_dimensions: int, reverse: bool = False
) -> Shaped[Tensor, "B L *channels"]:
    """Put transitions of 0 where a row starts anew, without a gradient.

    Args:
        a: transitions whose shape broadcasts to the inputs', (B, L, *channels).
        reset: True at the first step of each new sequence.
        n_dimensions: those of the inputs.
        reverse: whether the scan walks from the last step to the first; the state then enters a sequence's last step.
    """
    if reverse:
        reset = torch.cat([reset[:, 1:], torch.zeros_like(reset[:, :1])], 1)
    return torch.where(
        reset.view(*reset.shape, *[1] * (n_dimensions - 2)), torch.zeros((), dtype=a.dtype, device=a.device), a
    )


def run_resets(
    run: Callable[..., tuple[Tensor, Any]],
    x: Shaped[Tensor, "B L *rest"],
    state: Any,
    reset: Bool[Tensor, "B L"],
    *,
    mask: Bool[Tensor, "B L"] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Run a module over rows that start anew.

    Args:
        run: the module, `(x, state, mask=..., cu_seqlens=...) -> (y, state)`, either keyword or none given.
        x: its input.
        state: what the steps before left; None is the start of every stream.
        reset: True at the first step of each new sequence. At padding, the next counted step is the first.
        mask: True where a step counts.
        cu_seqlens: refused, so that callers need not.

    Returns:
        y, zeros at padding, and the state after each row's last sequence: `Ragged` if their layouts differ.

    Raises:
        TypeError, ValueError: as `check_reset` and `check_lengths`, or as the module.
    """
    check_reset(x, reset, cu_seqlens)
    check_lengths(x, mask, None)
    reset, counts = reset.cpu(), torch.ones_like(reset, device="cpu") if mask is None else mask.cpu()
    if not bool(reset.any()):
        return run(x, state, **_masked(counts, x))
    number = reset.cumsum(1)  # of the sequence in its row that each step belongs to
    longest = int((number == 0).sum(1).max())
    y, last = run(x[:, :longest], state, **_masked((counts & (number == 0))[:, :longest], x))
    n_new = number[:, -1]
    new = (counts & (number > 0)).flatten()
    sequences = ((n_new.cumsum(0) - n_new)[:, None] + number - 1).flatten()[new]
    lengths = torch.bincount(sequences, minlength=int(n_new.sum()))
    places = new.nonzero()[:, 0].to(x.device)
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    y_new, last_new = run(x.flatten(0, 1).index_select(0, places)[None], None, cu_seqlens=borders)
    y = y.to(y_new.dtype)  # which no steps at all need not have under autocast
    padding = y.new_zeros(len(x), x.shape[1] - longest, *y.shape[2:])
    y = torch.cat([y, padding], 1).flatten(0, 1).index_copy(0, places, y_new[0])
    return y.unflatten(0, x.shape[:2]), _after(last, last_new, n_new)


def _masked(counts: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {} if bool(counts.all()) else {"mask": counts.to(x.device)}


def _after(last: Any, last_new: Any, n_new: Tensor) -> Any:
    """The state after each row: of its last new sequence, or, if it has none, of what it began with."""
    old, ended = (n_new == 0).nonzero()[:, 0], n_new.nonzero()[:, 0]
    singles: dict[int, Any] = {}
    for rows, state, index in ((old, last, old), (ended, last_new, n_new.cumsum(0)[ended] - 1)):
        if len(rows):
            singles.update(zip(rows.tolist(), split(select(state, index))))
    return batch([singles[row] for row in range(len(n_new))])
