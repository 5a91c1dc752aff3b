"""Back-propagation through long streams in the memory of one piece (gradient checkpointing along time)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurra.checks import kind_of, require_tensor, require_whole_number, sentence


def checkpointed(
    module: Callable[..., tuple[Tensor, Any]],
    x: Shaped[Tensor, "B L *rest"],
    state: Any = None,
    *,
    piece: int,
    loss: Callable[..., Tensor] | None = None,
    targets: Shaped[Tensor, "B L *targets"] | None = None,
    mask: Bool[Tensor, "B L"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
) -> tuple[Tensor, Any]:
    """Run `module` over a stream piece by piece, and compute each piece again in the backward pass.

    Outputs, last state and all gradients are those of one call `module(x, state)`. From the forward pass only the
    states between the pieces stay in memory, so the peak is about that of one piece. The price is a second forward
    pass. Dropout draws the same numbers in both (Chen et al., arXiv 1604.06174, with pieces of time as the segments).

        y, state = checkpointed(mixer, x, state, piece=4096)
        loss, state = checkpointed(model, tokens, piece=4096, loss=summed, targets=targets)

    Args:
        module: any module of the contract, a mixer or a model; or a function of the same form.
        x: its input.
        state: what the steps before left; None is the start of a stream. Gradients flow into it.
        piece: steps per piece; the last piece takes what is left. A video model reads whole segments, so here it needs
            a multiple of their frames.
        loss: called on the output of each piece, as `loss(y)`, or `loss(y, targets of the piece)`. The sum of what it
            returns takes the place of y, so the outputs of two pieces are never in memory together: use it where they
            are large, as logits are. It is computed again too.
        targets: cut along time as x is, for `loss`.
        mask: (B, L), True where a step counts, cut along time, for a module that takes it.
        reset: (B, L), True where a sequence starts anew, likewise.

    Returns:
        y, or the sum of the losses; and the state after the last step.

    Raises:
        TypeError: x is not a tensor, or piece not a whole number.
        ValueError: piece is below 1, targets, mask or reset are not as long as x, or there are targets without a loss.
    """
    require_whole_number(1, piece=piece)
    _check(x, loss, targets, mask=mask, reset=reset)
    pieces = x.split(piece, 1)
    along = (mask, reset, targets)
    cut = (len(pieces) * (None,) if one is None else one.split(piece, 1) for one in along)
    results: list[Tensor] = []
    for here in zip(pieces, *cut):
        result, state = checkpoint(_run, module, loss, state, *here, use_reentrant=False)
        if loss is not None and results:
            result = results.pop() + result
        results.append(result)
    return (torch.cat(results, 1) if loss is None else results[0]), state


def _run(
    module: Callable[..., tuple[Tensor, Any]],
    loss: Callable[..., Tensor] | None,
    state: Any,
    x: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
    targets: Tensor | None,
) -> tuple[Tensor, Any]:
    given = {name: one for name, one in (("mask", mask), ("reset", reset)) if one is not None}
    y, state = module(x, state, **given)
    if loss is None:
        return y, state
    return loss(y) if targets is None else loss(y, targets), state


def _check(x: Tensor, loss: Callable[..., Tensor] | None, targets: Tensor | None, **lengths: Tensor | None) -> None:
    require_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(sentence("x", kind_of(x), "at least two dimensions, (B, L, ...)"))
    if targets is not None and loss is None:
        raise ValueError(sentence("targets", kind_of(targets), "None without a loss that takes them"))
    for name, along in (("targets", targets), *lengths.items()):
        if along is not None and along.shape[:2] != x.shape[:2]:
            expected = f"({', '.join(map(str, x.shape[:2]))}, ...), as x"
            raise ValueError(sentence(name, f"of shape {tuple(along.shape)}", expected))
