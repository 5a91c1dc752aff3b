"""Progress bars for work on a large file or on many files."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_A_BAR = 32 * 2**20
_MANY_ITEMS = 500


@contextmanager
def byte_progress(description: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes read since the last call.

    Draws a bar if standard error is a terminal and the work takes more than a few seconds (32 MiB).
    """
    if n_bytes < _WORTH_A_BAR or not sys.stderr.isatty():
        yield lambda n_read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=n_bytes)
        yield lambda n_read: progress.advance(task, n_read)


@contextmanager
def item_progress(description: str, n_items: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items done since the last call.

    Draws a bar if standard error is a terminal and the work takes more than a few seconds (500 items).
    """
    if n_items < _MANY_ITEMS or not sys.stderr.isatty():
        yield lambda n_done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=n_items)
        yield lambda n_done: progress.advance(task, n_done)
