"""Processes that prepare a corpus, and end with the one that started them."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context, parent_process
from threading import Thread
from typing import Any, TypeAlias

from recurra.checks import sentence

Map: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""`map`, whose function may run in other processes; results come in their order."""


@contextmanager
def worker_map(workers: int) -> Iterator[Map]:
    """Yield a `map` that calls the function in `workers` processes, or in this one. Raises OSError if one is killed."""
    if workers == 1:
        yield map
        return
    there = "forkserver" in get_all_start_methods()  # not on Windows
    processes = get_context("forkserver" if there else "spawn")
    if there:
        processes.set_forkserver_preload(["recurra.data.prepare"])
    pool = ProcessPoolExecutor(workers, processes, initializer=_end_with_parent)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        mend = "run the same command again, perhaps with fewer --workers"
        raise OSError(sentence("a worker", "killed, perhaps for lack of memory", "one that ends", mend)) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let this worker end when the process that started it is killed: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
