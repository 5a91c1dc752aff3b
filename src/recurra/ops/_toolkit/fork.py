"""Whether this process is a forked child: noted from the import of recurra on, not only from the first kernel.

GNU OpenMP hangs or kills a child that enters a parallel region after its parent did, even in one of torch's operators.
"""

import os

_is_forked_child = False


def _note_fork() -> None:
    global _is_forked_child
    _is_forked_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def is_forked_child() -> bool:
    """Return whether this process was forked after recurra was imported."""
    return _is_forked_child
