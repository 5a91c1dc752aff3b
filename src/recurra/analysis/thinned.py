"""A bounded selection of a stream whose length is not known."""

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Keeps every n-th item from the first on, n the smallest power of two with which they are no more than `limit`.

    Args:
        limit: the most items to keep, 2 or more.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"limit must be 2 or more, got {limit}")
        self.limit = limit
        self.stride = 1
        self.items: list[Item] = []
        self._n_seen = 0

    def add(self, item: Item) -> None:
        """Show the next item."""
        if self._n_seen % self.stride == 0:
            if len(self.items) == self.limit:
                self.items = self.items[::2]
                self.stride *= 2
            if self._n_seen % self.stride == 0:
                self.items.append(item)
        self._n_seen += 1
