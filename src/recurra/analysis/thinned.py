"""A bounded sample of a stream of unknown length."""

from typing import Generic, TypeVar

from recurra.checks import require_at_least

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Keeps every n-th item, starting with the first; n is the smallest power of two that keeps at most `limit` items.

    Args:
        limit: maximum number of items, at least 2.

    Raises:
        ValueError: `limit` is below 2.
    """

    def __init__(self, limit: int) -> None:
        require_at_least(2, limit=limit)
        self.limit = limit
        self.stride = 1
        self.items: list[Item] = []
        self._n_seen = 0

    def add(self, item: Item) -> None:
        """Add the next item of the stream."""
        if self._n_seen % self.stride == 0:
            if len(self.items) == self.limit:
                self.items = self.items[::2]
                self.stride *= 2
            if self._n_seen % self.stride == 0:
                self.items.append(item)
        self._n_seen += 1
