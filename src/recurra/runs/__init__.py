"""Trained runs: open them, score and convert them, draw their figures.

`recurra.open_run(path)` gives a `Run`. The other modules take one, and need what they measure or draw with.
"""

from recurra.runs.run import Run, open_run

__all__ = ["Run", "open_run"]
