"""Read the items of the next step in threads while the caller works on this one."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReadAhead(Generic[Item, Result]):
    """Calls `read` on the items of a step, and then on those of the step that will probably come next.

    The results are always those of `[read(item) for item in items]`, even if another step comes next.

    workers: threads; with 0 nothing is read ahead.
    """

    def __init__(self, read: Callable[[Item], Result], workers: int) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="recurra-decode") if workers else None
        self._pending: tuple[Hashable, list[Future[Result]]] = (None, [])

    def get(
        self, step: Hashable, items: Sequence[Item], following: tuple[Hashable, Sequence[Item]] | None
    ) -> list[Result]:
        """Return the results of a step; `following` is the next step and its items. Raises what `read` raises."""
        if self._pool is None:
            return [self._read(item) for item in items]
        expected, futures = self._pending
        if expected != step:
            for future in futures:
                future.cancel()
            futures = [self._pool.submit(self._read, item) for item in items]
        self._pending = (None, [])
        if following is not None:
            self._pending = (following[0], [self._pool.submit(self._read, item) for item in following[1]])
        return [future.result() for future in futures]
