"""What the engine has done, as plain numbers that any thread may read."""

from collections import deque
from dataclasses import dataclass, field

KEPT = 4096
"""Durations of each kind that are kept between two readings."""


@dataclass
class Counters:
    """Totals since the start, and durations in seconds since they were last taken."""

    read: int = 0
    """Tokens read."""
    written: int = 0
    """Tokens written."""
    steps: int = 0
    """Steps of batches."""
    ended: int = 0
    """Texts that ended, of which a turn may write several; a turn that only reads counts as one."""
    failed: int = 0
    """Those of them that ended with an error."""
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """From a turn's arrival to its first token."""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Of a step of a batch."""
