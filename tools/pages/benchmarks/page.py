"""The benchmarks page: what its sections may call. Every number comes from the record of a measurement."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.pages.benchmarks import curves, tables
from tools.pages.benchmarks.figures import RESOLVED_MEGABYTES, SweepFigures
from tools.pages.benchmarks.measure import LEAST_ROUNDS, MOST_ROUNDS
from tools.pages.page import Page

Record = Mapping[str, Any]


class BenchmarksPage(Page):
    """The page of a folder with sections/NN-title.md.jinja, for a record.

    Args:
        folder: the page is beside it, FOLDER.md, and the figures in figures/ there.
        record: what was measured.
        draw: False leaves the figures' files alone; the text is the same.

    Raises:
        FileNotFoundError: there are no sections.
    """

    def __init__(self, folder: Path, record: Record, *, draw: bool = True) -> None:
        self.record = record
        figures = SweepFigures(record, folder.parent / "figures" if draw else None)
        functions: dict[str, Callable[..., Any]] = {
            "machine_table": lambda: tables.machine_table(record),
            "measured_sweeps": lambda: measured_sweeps(record),
            "sweep_figure": figures.sweep,
            "ratios_table": lambda sweep: tables.ratios_table(record, sweep),
            "details_table": tables.details_table,
            "sentences": tables.sentences,
            "spread": lambda: curves.spread(record),
            "absent": lambda: sorted({name for sweep in record["sweeps"].values() for name in sweep["absent"]}),
            "power": tables.power,
        }
        values = {
            "record": record,
            "least_rounds": LEAST_ROUNDS,
            "most_rounds": MOST_ROUNDS,
            "resolved_megabytes": RESOLVED_MEGABYTES,
        }
        super().__init__(folder, command="make bench-page", figures=figures, functions=functions, values=values)


def measured_sweeps(record: Record) -> dict[str, Any]:
    """Give the sweeps of a record that have points, by key."""
    return {key: sweep for key, sweep in record["sweeps"].items() if any(sweep["times"].values())}
