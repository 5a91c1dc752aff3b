"""Errors of a command that torchrun started several times: each is said once, by the rank that it came from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from recurra.train.distributed import Ranks, is_first_launched, n_launched

_WAIT = 1.0
"""Seconds that other ranks wait before they report: an error of all ranks has then been reported by the first, and
torchrun has ended them."""


class _AnotherRankEnded(OSError):
    """This rank cannot go on because another one ended."""


@contextmanager
def reporting_together() -> Iterator[None]:
    """Let the rank with the first error report it, to the terminal and to torchrun, and end the others.

    Without torchrun this does nothing.
    """
    if n_launched() == 1:
        yield
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        if _is_lost_connection(error):
            time.sleep(3 * _WAIT)  # torchrun shall see the other one first
            raise _AnotherRankEnded("another rank ended, and its message says why") from error
        handler.record_exception(error)
        if not is_first_launched():
            time.sleep(_WAIT)
        raise
    if dist.is_initialized():  # threads of a group that is left over can abort the interpreter when it ends
        dist.destroy_process_group()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Yield the ranks that torchrun started, which can exchange plain data; one rank without torchrun."""
    if n_launched() == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _is_lost_connection(error: BaseException) -> bool:
    """Say whether an error is what torch.distributed raises when another rank is gone."""
    text = str(error)
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "NCCL error")
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text) and any(x in text for x in lost)
