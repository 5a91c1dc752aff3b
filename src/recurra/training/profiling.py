"""A trace of some steps of a run, for chrome://tracing or Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP = 3
"""Steps before those that are traced: the first ones compile kernels and fill caches."""


class Trace:
    """Traces `n_steps` steps after the first few, and writes them to a file.

    Args:
        path: the file.
        n_steps: how many; 0 traces nothing.
    """

    def __init__(self, path: Path, n_steps: int) -> None:
        self._path, self._left = path, WARM_UP + n_steps if n_steps else 0
        if not n_steps:
            return
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        plan = schedule(wait=WARM_UP - 1, warmup=1, active=n_steps, repeat=1)
        self._profile = profile(activities=kinds, schedule=plan, on_trace_ready=self._write)
        self._profile.start()

    def _write(self, found: profile) -> None:
        found.export_chrome_trace(str(self._path))

    def step(self) -> None:
        """Note that a step has ended."""
        if self._left:
            self._left -= 1
            self._profile.step()
            if not self._left:
                self._profile.stop()

    def close(self) -> None:
        """Write what there is, if the run ends before all steps have been traced."""
        if self._left:
            self._left = 0
            self._profile.stop()
