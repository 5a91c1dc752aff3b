"""One sequence over several processes: each scans its own piece of time, and one exchange passes the carries.

A piece acts on the state that enters it as h -> P h + S, with P the product of its gates and S its last state when it
starts from zero: the pair (P, S) is a leaf of the scan's operator (GateLoop App. B), one for each process. Every
process gathers all pairs and combines those before its own. The gradient runs the other way in the same manner: with

    g_t = dh_t + conj(a_{t+1}) g_{t+1}        db_t = g_t        da_t = g_t conj(h_{t-1})

a piece turns the gradient c of its last state into e + conj(P) c at its entry, where e comes from its own dh alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from recurra.kernels.backends import choose_backend
from recurra.kernels.tensors import HALF
from recurra.scan.linear import check_shapes, common_dtype, linear_scan
from recurra.scan.operators import previous_states


def sharded_scan(
    a: Tensor,
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "B *channels"] | None = None,
    *,
    group: "dist.ProcessGroup",
    backend: str = "auto",
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t over a sequence of which rank r of `group` holds the r-th contiguous piece.

    All processes of the group call it together, each with its piece: lengths may differ and may be 0; batch, channels
    and types are the same everywhere. There is one exchange (`all_gather`) of two states' size per process in the
    forward pass and one of a single state's size in the backward pass. The result is that of `linear_scan` over the
    unsplit sequence: the states in value, and a, b and h0 in gradient, where the loss is the sum of all processes'.

    A process walks its piece twice each way, for what it passes on and again with what comes in (at the end where the
    carry starts, once), so the time is that of two local scans and an exchange. Products of many gates larger than 1
    overflow sooner than the states would.

    Args:
        a: this piece's transitions, of any shape that broadcasts to b's, as `linear_scan` takes them.
        b: this piece's inputs, (B, L, *channels).
        h0: the state before the whole sequence; zeros when None. It is rank 0's that counts: the others may give the
            same tensor, as a program that is the same everywhere does, or None, and get a gradient of zero for it. So
            gradients that are summed over the processes come out right for h0 as they do for shared weights.
        group: the processes, in the order of time; `torch.distributed.group.WORLD` for all.
        backend: as for `linear_scan`.

    Returns:
        This piece's states, (B, L, *channels), in the type that a and b promote to. The state after the whole sequence
        is the last one of the last process.

    Differentiable once, by `backward`, which every process must run through its own result, for it is an exchange too.
    As in any distributed program, an error that one process raises alone leaves the others waiting; shapes that differ
    between processes are found by TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Raises:
        TypeError: an argument is no tensor, of an integer type, or group is no process group that this process is in;
            or h0 would widen the type of a and b, on which the processes must agree.
        ValueError: shapes or devices do not fit, there is no such backend, or a gradient is asked for on some processes
            and not on others (all of them raise).
        NotImplementedError: in the backward pass, where its gradient is to be differentiated in its turn.
        RuntimeError: torch.distributed is not set up, or the backend cannot run here.
    """
    _check_group(group)
    dtype = common_dtype(a, b, h0)
    check_shapes(a, b, h0)
    choose_backend(backend, b.device)
    if dtype != torch.promote_types(a.dtype, b.dtype):
        raise TypeError(
            f"h0 is of type {None if h0 is None else h0.dtype}, wider than a's and b's "
            f"{torch.promote_types(a.dtype, b.dtype)}, on which all processes agree; convert a or b, or h0"
        )
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, h0))
    computed = torch.float32 if dtype in HALF else dtype
    start = b.new_zeros(b.shape[:1] + b.shape[2:], dtype=computed) if h0 is None else h0.to(computed)
    a, b = a.to(computed).expand(b.shape), b.to(computed)
    return _ShardedScan.apply(a, b, start, group, backend, records).to(dtype)


class _ShardedScan(torch.autograd.Function):
    """The scan of one piece, a and b of the same shape and type, start (B, *channels)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, start: Tensor, group: Any, backend: str, records: bool) -> Tensor:
        rank = dist.get_rank(group)
        entering = start if rank == 0 else torch.zeros_like(start)
        h = linear_scan(a, b, entering, backend=backend)
        flag = torch.full_like(entering[:1].flatten()[:1], float(records))
        gathered = _gather([a.prod(1), _last(h, entering), flag], group)
        products = [product for product, _, _ in gathered]
        asked = torch.cat([flag for _, _, flag in gathered]).real.tolist()
        if 0 < sum(asked) < len(asked):
            ranks = [r for r, yes in enumerate(asked) if yes]
            raise ValueError(
                f"a gradient is asked for on rank(s) {ranks} of {len(asked)} and not on the others: let a, b or h0 "
                f"require one on every rank or on none, for backward is an exchange too"
            )
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
        if torch.is_grad_enabled():  # torch's once_differentiable would lose what comes through a and h without a word
            raise NotImplementedError("sharded_scan can be differentiated once only; leave create_graph=True away")
        a, h, entering = ctx.saved_tensors
        rank, nothing = dist.get_rank(ctx.group), torch.zeros_like(entering)
        # the gate of the step behind the piece is in c already: c is the gradient of the piece's last state itself
        gates = torch.cat([a[:, 1:], torch.ones_like(a[:, :1])], 1).conj()

        def walk_back(c: Tensor) -> tuple[Tensor, Tensor]:
            g = linear_scan(gates, dh, c, reverse=True, backend=ctx.backend)
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


def _last(h: Tensor, entering: Tensor) -> Tensor:
    return h[:, -1] if h.shape[1] else entering


def _gather(tensors: list[Tensor], group: Any) -> list[list[Tensor]]:
    """Give every process's `tensors`, by rank, in a single exchange; all of one type, of equal shapes everywhere."""
    own = torch.cat([x.flatten() for x in tensors]).resolve_conj()
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, own, group=group)
    sizes = [x.numel() for x in tensors]
    return [[part.view(x.shape) for part, x in zip(flat.split(sizes), tensors)] for flat in all_of_them]


def _check_group(group: Any) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("torch.distributed is not set up in this process; call torch.distributed.init_process_group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; expected a torch.distributed.ProcessGroup that this process is in, such as "
            f"torch.distributed.group.WORLD or what new_group gives its members"
        )
