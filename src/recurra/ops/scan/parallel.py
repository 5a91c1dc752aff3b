"""One sequence over several processes: each scans its own piece of time, and one exchange passes on the states.

A piece maps its incoming state as h -> P h + S, where P is the product of its transitions and S its last state when it
starts from zero. The pair (P, S) of each process is a leaf of the scan's operator (GateLoop App. B): every process
gathers all pairs and combines those before its own. The gradient runs backwards in the same way: with

    g_t = dh_t + conj(a_{t+1}) g_{t+1}        db_t = g_t        da_t = g_t conj(h_{t-1})

a piece turns the gradient c of its last state into e + conj(P) c at its entry, where e comes from its own dh alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.ops._operator import HALF
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops.scan.operator import check_shapes, common_dtype, linear_scan, previous_states
from recurra.state import last_step


def sharded_scan(
    a: Tensor,
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "B *channels"] | None = None,
    *,
    group: "dist.ProcessGroup",
    backend: str = "auto",
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t over a sequence; rank r of `group` has its r-th contiguous piece.

    All processes of the group call it together, each with its piece. Lengths may differ and may be 0; batch, channels
    and types are the same everywhere. The forward pass makes one exchange (`all_gather`) of two states' size per
    process, the backward pass one of a single state's size. States and gradients are those of `linear_scan` over the
    whole sequence, where the loss is the sum of all processes' losses.

    Each process scans its piece twice in each direction: first for the values that it sends, then with those that it
    receives. (The first piece, and backwards the last, is scanned once.) The time is that of two local scans and an
    exchange.
    Products of many transitions larger than 1 overflow sooner than the states would.

    Args:
        a: this piece's transitions, of any shape that broadcasts to b's, as for `linear_scan`.
        b: this piece's inputs, (B, L, *channels).
        h0: the state before the whole sequence; zeros if None. Only rank 0's is used. The others can pass the same
            tensor or None; its gradient is zero there. Gradients summed over the processes are therefore correct for
            h0, as they are for shared weights.
        group: the processes, in the order of time; `torch.distributed.group.WORLD` for all.
        backend: as for `linear_scan`.

    Returns:
        This piece's states, (B, L, *channels), in the type that a and b promote to. The state after the whole sequence
        is the last one of the last process.

    It can be differentiated once. Every process must run `backward` through its own result, because the backward pass
    also makes an exchange. As in any distributed program, an error in only one process leaves the others waiting.
    TORCH_DISTRIBUTED_DEBUG=DETAIL finds shapes that differ between processes.

    Raises:
        TypeError: an argument is not a tensor or has an integer type; `group` is not a process group that contains this
            process; or h0 would widen the type of a and b, on which all processes must agree.
        ValueError: shapes or devices do not fit, the backend does not exist, or only some processes need a gradient
            (all of them raise).
        NotImplementedError: in the backward pass, if the gradient is to be differentiated again.
        RuntimeError: torch.distributed is not initialised, or the backend cannot run here.
    """
    _check_group(group)
    dtype = common_dtype(a, b, h0)
    check_shapes(a, b, h0)
    choose_backend(backend, b.device)
    if dtype != torch.promote_types(a.dtype, b.dtype):
        widest = torch.promote_types(a.dtype, b.dtype)
        hint = "convert it, or a and b on every process"
        raise TypeError(sentence("h0", kind_of(h0), f"a type no wider than a's and b's {widest}", hint))
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, h0))
    computed = torch.float32 if dtype in HALF else dtype
    start = b.new_zeros(b.shape[:1] + b.shape[2:], dtype=computed) if h0 is None else h0.to(computed)
    a, b = a.to(computed).expand(b.shape), b.to(computed)
    return _ShardedScan.apply(a, b, start, group, backend, records).to(dtype)


def refuse_second_derivative(what: str) -> None:
    """Raise NotImplementedError in a backward pass whose result is to be differentiated: an exchange has no graph."""
    if torch.is_grad_enabled():  # torch's once_differentiable would silently lose what comes through saved tensors
        raise NotImplementedError(f"{what} can be differentiated once only: omit create_graph=True")


class _ShardedScan(torch.autograd.Function):
    """The scan of one piece: a and b of one shape and type, start (B, *channels)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, start: Tensor, group: Any, backend: str, records: bool) -> Tensor:
        rank = dist.get_rank(group)
        entering = start if rank == 0 else torch.zeros_like(start)
        h = linear_scan(a, b, entering, backend=backend)
        flag = torch.full_like(entering[:1].flatten()[:1], float(records))
        gathered = _gather([a.prod(1), last_step(h, entering), flag], group)
        products = [product for product, _, _ in gathered]
        asked = torch.cat([flag for _, _, flag in gathered]).real.tolist()
        if 0 < sum(asked) < len(asked):
            ranks = [r for r, yes in enumerate(asked) if yes]
            hint = "let a, b or h0 require one on each of them, because backward is an exchange too"
            got = f"True on ranks {ranks} of {len(asked)} alone"
            raise ValueError(sentence("requires_grad", got, "the same on every rank", hint))
        if rank > 0:
            entering = gathered[0][1]
            for product, last, _ in gathered[1:rank]:
                entering = product * entering + last
            h = linear_scan(a, b, entering, backend=backend)
        ctx.group, ctx.backend, ctx.products = group, backend, products
        ctx.save_for_backward(a, h, entering)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("sharded_scan")
        a, h, entering = ctx.saved_tensors
        rank, nothing = dist.get_rank(ctx.group), torch.zeros_like(entering)
        # c is the gradient of the piece's last state itself, so it contains the transition of the step that follows
        later_a = torch.cat([a[:, 1:], torch.ones_like(a[:, :1])], 1).conj()

        def walk_back(c: Tensor) -> tuple[Tensor, Tensor]:
            g = linear_scan(later_a, dh, c, reverse=True, backend=ctx.backend)
            return g, g[:, 0] * a[:, 0].conj() if a.shape[1] else c

        g, leaving = walk_back(nothing)
        gathered = _gather([leaving], ctx.group)
        if rank < len(gathered) - 1:
            c = gathered[-1][0]
            for (e,), product in reversed([*zip(gathered, ctx.products)][rank + 1 : -1]):
                c = e + product.conj() * c
            g, leaving = walk_back(c)
        da = g * previous_states(h, entering, reverse=False).conj() if a.shape[1] else torch.zeros_like(a)
        return da, g, leaving if rank == 0 else nothing, None, None, None


def _gather(tensors: list[Tensor], group: Any) -> list[list[Tensor]]:
    """Collect every process's `tensors`, by rank, in one exchange; they share one type, and shapes across processes."""
    own = torch.cat([x.flatten() for x in tensors]).resolve_conj()
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, own, group=group)
    sizes = [x.numel() for x in tensors]
    return [[part.view(x.shape) for part, x in zip(flat.split(sizes), tensors)] for flat in all_of_them]


def _check_group(group: Any) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        hint = "call torch.distributed.init_process_group"
        raise RuntimeError(sentence("torch.distributed", "not initialised in this process", "a process group", hint))
    if not isinstance(group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup that contains this process, such as torch.distributed.group.WORLD"
        raise TypeError(sentence("group", repr(group), expected))
