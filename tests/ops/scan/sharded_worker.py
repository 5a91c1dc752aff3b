"""One of the processes of test_sharded.py: run as `python sharded_worker.py RANK WORLD PORT FOLDER`.

Reads the problems that the test wrote to FOLDER/problems.pt, scans its pieces and writes FOLDER/RANK.pt.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recurra.ops.scan.parallel import sharded_scan

exchanges = []


def count_exchanges(gather):
    def counted(outputs, own, group=None):
        exchanges.append(own.numel())
        return gather(outputs, own, group=group)

    return counted


def solve(problem, rank, group):
    """Scan this rank's piece; return h, the gradients of a, b and h0 for the incoming dh, and the exchanges' sizes."""
    edges = [0, *torch.tensor(problem["lengths"]).cumsum(0).tolist()]
    piece = slice(edges[rank], edges[rank + 1])
    a, h0 = problem["a"], problem["h0"]
    a = (a[..., piece, :] if problem["a_has_time"] else a).clone().requires_grad_()
    b = problem["b"][:, piece].clone().requires_grad_()
    h0 = h0.clone().requires_grad_() if h0 is not None and (rank == 0 or problem["h0_everywhere"]) else None
    exchanges.clear()
    h = sharded_scan(a, b, h0, group=group, backend="reference")
    forward = list(exchanges)
    h.backward(problem["dh"][:, piece])
    gradients = {"a": a.grad, "b": b.grad, "h0": None if h0 is None else h0.grad}
    return {"h": h.detach(), **gradients, "forward": forward, "backward": exchanges[len(forward) :]}


def complain(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def complaints(rank, world, others):
    """Errors that every rank raises, or that are raised before anything is exchanged."""
    b = torch.ones(2, 3, 4)
    some = torch.ones(4, requires_grad=rank == 1)
    messages = {
        "uneven gradients": complain(lambda: sharded_scan(some, b, group=world)),
        "stranger": complain(lambda: sharded_scan(some, b, group=others)),
        "wide h0": complain(lambda: sharded_scan(some, b, torch.ones(2, 4).double(), group=world)),
        "shape of a": complain(lambda: sharded_scan(torch.ones(3), b, group=world)),
        "backend": complain(lambda: sharded_scan(some, b, group=world, backend="fast")),
    }
    x = torch.ones(4, requires_grad=True)
    h = sharded_scan(x, b, group=world)
    return {**messages, "second derivative": complain(lambda: torch.autograd.grad(h.sum(), x, create_graph=True))}


def main():
    (rank, world, port), folder = map(int, sys.argv[1:4]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    dist.all_gather = count_exchanges(dist.all_gather)
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    mine = rank // 2
    results = {}
    for name, problem in torch.load(folder / "problems.pt").items():
        members = len(problem["lengths"])
        if members == world:
            results[name] = solve(problem, rank, dist.group.WORLD)
        else:
            results[name] = solve(problem, rank % 2, pairs[mine])
    results["complaints"] = complaints(rank, dist.group.WORLD, pairs[1 - mine])
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # everything is written, and an orderly end takes as long as the start


main()
