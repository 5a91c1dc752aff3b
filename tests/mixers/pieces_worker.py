"""The ranks of test_pieces.py, forked from one process that imports for all: `python pieces_worker.py FOLDER`."""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recurra.mixers.base import create_mixer
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.train.sequence_parallel import Pieces, SequenceParallel, final_state, in_pieces

RANKS = 3


def case(module, x, state, cut):
    """Run this rank's piece; return output, last state and the gradients of weights, input and the state before."""
    x = x.clone().requires_grad_(x.is_floating_point())
    state = type(state)(*(t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in state))
    piece = x[:, cut]
    y, last = module(piece, state)
    weights = torch.linspace(-1, 1, x.shape[1], dtype=torch.float64)[cut, None]
    loss = (y * weights * torch.arange(1, y.shape[-1] + 1)).sum()
    return x, state, y, last, loss


def refusal(name, pieces):
    """Say how a second derivative is refused; "" if it is not."""
    module = create_mixer(name, 8)
    y, _ = SequenceParallel(module, pieces.group)(torch.randn(1, 3, 8))
    try:
        y.square().sum().backward(create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def start(name, problem):
    """Make the mixer of a problem and its state."""
    torch.manual_seed(0)
    module = create_mixer(name, 8, **problem["options"])
    return module, type(module.initial_state(2))(*problem["state"])


def load_kernels(problems):
    """Run all mixers once, so that ranks, which are forked after that, find kernels compiled and modules imported."""
    for name, problem in problems.items():
        module, state = start(name, problem)
        *_, loss = case(module, problem["x"], state, slice(None))
        loss.backward()


def solve(pieces, problems):
    """Run all problems as one of the ranks that share a sequence."""
    rank, world, results = pieces.rank, pieces.count, {}
    for name, problem in problems.items():
        module, state = start(name, problem)
        edges = [0, *torch.tensor(problem["lengths"][world]).cumsum(0).tolist()]
        shared = SequenceParallel(module, pieces.group)
        x, state, y, last, loss = case(shared, problem["x"], state, slice(edges[rank], edges[rank + 1]))
        if rank == world - 1:  # and through the last state
            loss = loss + sum(t.abs().square().sum() for t in tensors(last) if t.requires_grad)
        loss.backward()
        gradients = [x.grad, *(p.grad for p in module.parameters()), *(t.grad for t in state)]
        gradients = [torch.zeros(()) if g is None else g for g in gradients]
        results[name] = {"y": y.detach(), "gradients": gradients, "last": list(final_state(last, pieces))}
    results["second derivatives"] = {name: refusal(name, pieces) for name in ("gateloop", "slstm")}
    torch.manual_seed(0)
    config = LanguageModelConfig(11, n_layer=3, d_model=8, d_channel_mixing=8, mixer=["gateloop", "gru", "mamba"])
    model = LanguageModel(config)
    tokens = torch.arange(62).view(2, 31) * 7 % 11
    cut = slice(30 * rank // world, 30 * (rank + 1) // world)
    inputs, targets = tokens[:, :-1][:, cut], tokens[:, 1:][:, cut]
    losses, _ = in_pieces(model, lambda entering: model.loss(inputs, targets, entering), None, pieces)
    losses.sum().backward()
    results["model"] = {"y": losses.detach(), "gradients": [p.grad for p in model.parameters()], "last": []}
    return results


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    problems = torch.load(folder / "problems.pt")
    load_kernels(problems)
    children = []
    for rank in range(RANKS):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                run(rank, folder, problems)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses)


def run(rank, folder, problems):
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=240))
    two = dist.new_group([0, 1])
    torch.save(solve(Pieces.of(dist.group.WORLD), problems), folder / f"{RANKS}-{rank}.pt")
    if rank < 2:
        torch.save(solve(Pieces.of(two), problems), folder / f"2-{rank}.pt")
    dist.barrier()
    os._exit(0)


main()
