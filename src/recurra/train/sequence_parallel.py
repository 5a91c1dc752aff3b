"""One sequence in consecutive pieces on several ranks: passes states forwards and gradients back between the pieces.

There are two ways to pass on the states. A linear recurrence maps a piece's incoming state as h -> P h + S: all ranks
compute their P and S at once, exchange them, and start from the state of the pieces before them (`Pieces.recur`).
Anything else waits for the piece before (`Pieces.run`): rank r works on layer n while rank r + 1 works on layer n - 1.

Only first derivatives are supported: a differentiable backward pass raises NotImplementedError. As in any program with
several ranks, an error in one leaves the others waiting for it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from recurra.mixers.base import Mixer, Recurrence
from recurra.models.language_model import LanguageModel
from recurra.state import map_tensors, tensors


@dataclass(frozen=True)
class Pieces:
    """The ranks that share a sequence, in the order of time: their process group, this one's place in it, how many."""

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, group: Any) -> "Pieces":
        """Take the ranks of a group in their order."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def global_rank(self, place: int) -> int:
        """Return the rank, among all of the run, at a place of this group."""
        return dist.get_global_rank(self.group, place)

    def run(self, call: Callable[[Any], tuple[Tensor, Any]], state: Any) -> tuple[Tensor, Any]:
        """Compute this rank's piece once the piece before it has been computed, and hand its state to the next."""
        link = None
        if self.rank > 0:
            link, state = _receive(self)
        y, state = call(state)
        if link is not None:
            y = y + link.to(y.dtype)
        if self.rank < self.count - 1:
            y, state = _send(y, state, self)
        return y, state

    def recur(self, run: Recurrence, a: Any, h0: Tensor) -> tuple[Tensor, Tensor]:
        """Walk a piece from zeros for what it passes on, exchange, and walk it again from what comes in."""
        _, last = run(torch.zeros_like(h0))
        if not isinstance(a, Tensor):  # planes
            a = a.re if a.im is None else torch.complex(a.re, a.im)
        product = a.prod(1)
        product = product[(..., *(None for _ in range(last.dim() - product.dim())))]
        # every piece maps states as h -> product h + last
        return run(_Entering.apply(product.expand(last.shape).to(last.dtype), last, h0.to(last.dtype), self))


class SequenceParallel(nn.Module):
    """A module over several ranks, each with a consecutive piece of the sequence: y, state = parallel(piece, state).

    The first rank's `state` is that before the whole sequence; each rank returns the state after its own piece
    (`final_state` sends the last one to all). Outputs and gradients equal those of one rank. In a mixer or a
    `LanguageModel`, every mixer exchanges its own state; any other module passes on its whole state.

    Args:
        module: the module, which is shared with the caller and keeps its parameters.
        group: the ranks that share a sequence, in the order of time.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        super().__init__()
        self.module, self.pieces = module, Pieces.of(group)

    def forward(self, x: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Compute this rank's piece."""
        return in_pieces(self.module, lambda entering: self.module(x, entering, **options), state, self.pieces)


def in_pieces(
    module: nn.Module, call: Callable[[Any], tuple[Tensor, Any]], state: Any, pieces: Pieces
) -> tuple[Tensor, Any]:
    """Return `call(state)`, which runs `module` once, for this rank's piece of a sequence."""
    if not isinstance(module, (Mixer, LanguageModel)):
        return pieces.run(call, state)
    mixers = list(_outermost_mixers(module))
    for mixer in mixers:
        mixer.across = pieces
    try:
        return call(state)
    finally:
        for mixer in mixers:
            mixer.across = None


def _outermost_mixers(module: nn.Module) -> Iterator[Mixer]:
    if isinstance(module, Mixer):
        yield module
        return
    for child in module.children():
        yield from _outermost_mixers(child)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # torch's once_differentiable would silently lose what comes through saved tensors
        got = "a sequence shared by several ranks can be differentiated once only"
        raise NotImplementedError(f"{got}: omit create_graph=True")


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, last: Tensor, start: Tensor, pieces: Pieces) -> Tensor:
        own = torch.stack([product, last, start]).resolve_conj().contiguous()
        gathered = [torch.empty_like(own) for _ in range(pieces.count)]
        dist.all_gather(gathered, own, group=pieces.group)
        entering = gathered[0][2]
        for product_before, last_before, _ in gathered[: pieces.rank]:
            entering = product_before * entering + last_before
        ctx.products, ctx.pieces = [one[0] for one in gathered], pieces
        ctx.save_for_backward(entering)
        return entering.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        pieces, (entering,) = ctx.pieces, ctx.saved_tensors
        own = gradient.resolve_conj().contiguous()
        gathered = [torch.empty_like(own) for _ in range(pieces.count)]
        dist.all_gather(gathered, own, group=pieces.group)
        after = torch.zeros_like(own)  # the gradient of the state that leaves this piece
        for direct, product in reversed([*zip(gathered, ctx.products)][pieces.rank + 1 :]):
            after = direct + product.conj() * after
        at_start = own + ctx.products[pieces.rank].conj() * after if pieces.rank == 0 else torch.zeros_like(own)
        return after * entering.conj(), after, at_start, None


def _send(y: Tensor, state: Any, pieces: Pieces) -> tuple[Tensor, Any]:
    dist.send_object_list([y.device.type, _on_cpu(state)], pieces.global_rank(pieces.rank + 1), group=pieces.group)
    leaves, structure = tree_flatten(state)
    y, *linked = _Send.apply(pieces, y, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    return y, tree_unflatten(_with_tensors(leaves, linked), structure)


def _receive(pieces: Pieces) -> tuple[Tensor, Any]:
    told: list[Any] = [None, None]
    dist.recv_object_list(told, pieces.global_rank(pieces.rank - 1), group=pieces.group)
    device, state = told
    leaves, structure = tree_flatten(state)
    received = [leaf.to(device) for leaf in leaves if isinstance(leaf, Tensor)]
    link, *linked = _Receive.apply(pieces, torch.zeros((), requires_grad=torch.is_grad_enabled()), *received)
    return link, tree_unflatten(_with_tensors(leaves, linked), structure)


def _on_cpu(state: Any) -> Any:
    """Return a state that can be pickled by itself: a view would take along all of its memory."""
    return map_tensors(lambda x: x.detach().resolve_conj().cpu().clone(), state)


def _with_tensors(leaves: list[Any], linked: Iterable[Tensor]) -> list[Any]:
    remaining = iter(linked)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class _Send(torch.autograd.Function):
    """Backward it waits for the gradient of the state that was sent, which comes before y's is used."""

    @staticmethod
    def forward(ctx: Any, pieces: Pieces, y: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        ctx.pieces, ctx.forms = pieces, [torch.empty_like(tensor, device="meta") for tensor in state]
        return (y.view_as(y), *(tensor.view_as(tensor) for tensor in state))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *direct: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        gradients: list[Tensor | None] = []
        for form, own in zip(ctx.forms, direct):
            if not _differentiable(form):
                gradients.append(None)
                continue
            there = torch.empty(form.shape, dtype=form.dtype, device=dy.device)
            wire = _wire(there)
            dist.recv(wire, ctx.pieces.global_rank(ctx.pieces.rank + 1), group=ctx.pieces.group)
            there = torch.view_as_complex(wire) if form.is_complex() else wire
            gradients.append(there if own is None else there + own)
        return None, dy, *gradients


class _Receive(torch.autograd.Function):
    """Backward it sends the gradient of the state that was received."""

    @staticmethod
    def forward(ctx: Any, pieces: Pieces, link: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        ctx.pieces = pieces
        received = [tensor.clone() for tensor in state]
        ctx.mark_non_differentiable(*(tensor for tensor in received if not _differentiable(tensor)))
        ctx.save_for_backward(*(torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape) for t in received))
        return (link.clone(), *received)

    @staticmethod
    def backward(ctx: Any, dlink: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        for zeros, gradient in zip(ctx.saved_tensors, gradients):
            if _differentiable(zeros):
                own = zeros if gradient is None else gradient
                dist.send(_wire(own), ctx.pieces.global_rank(ctx.pieces.rank - 1), group=ctx.pieces.group)
        return None, dlink, *(None for _ in gradients)


def _wire(tensor: Tensor) -> Tensor:
    """What travels: contiguous, and complex numbers as pairs of real ones."""
    tensor = tensor.detach().resolve_conj().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def final_state(state: Any, pieces: Pieces) -> Any:
    """Return the state after the whole sequence, which the last rank has, on every rank, without gradients."""
    told = [_on_cpu(state)]
    dist.broadcast_object_list(told, pieces.global_rank(pieces.count - 1), group=pieces.group)
    device = next((tensor.device for tensor in tensors(state)), torch.device("cpu"))
    return map_tensors(lambda x: x.to(device), told[0])
