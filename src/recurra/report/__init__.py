"""A page of results out of hand-written sections and small summaries of runs; no run's folder is needed for it.

`recurra report` makes the summaries and the page; docs/results/README.md says how to add a run.
"""

from recurra.report.page import Page, ReportError
from recurra.runs.summary import Summary, read_summaries, read_summary, thinned_curve, write_summary

__all__ = [
    "Page",
    "ReportError",
    "Summary",
    "read_summaries",
    "read_summary",
    "thinned_curve",
    "write_summary",
]
