"""Tables of commands: drawn on a terminal, or printed as JSON, CSV or LaTeX with `--json`, `--csv` or `--latex`."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from recurra.train.experiment import flat


def print_table(
    style: str | None, rows: Sequence[Mapping[str, Any]], table: Table, width: int = 0, *, wide: bool = False
) -> None:
    """Print a table on the standard output.

    Args:
        style: json or csv, which print all of `rows` unrounded; latex, or None for a terminal, which print `table`.
        width: at least this many columns on a terminal; a narrower one wraps its lines.
        wide: whether a file or a pipe gets 200 columns.
    """
    if style == "json":
        print(json.dumps(rows, indent=2))
    elif style == "csv":
        print(_as_csv(rows), end="")
    elif style == "latex":
        print(_as_latex(table))
    else:
        console = Console(markup=False, highlight=False)
        console.width = max(console.width, 200 if wide and not console.is_terminal else width)
        console.print(table)


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write one line a row; keys inside of a value follow its own after a dot, and lists have spaces in between."""
    plain = [
        {key: " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value for key, value in flat(row)}
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in plain for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()


_IN_LATEX = str.maketrans({**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "±": r"$\pm$"})


def _as_latex(table: Table) -> str:
    """Write a table for LaTeX, with the rules of the package booktabs."""
    headings = [str(column.header).replace("/\n", "/").replace("\n", " ") for column in table.columns]
    cells = zip(*(map(str, column.cells) for column in table.columns))
    first, *others = (" & ".join(cell.translate(_IN_LATEX) for cell in row) + r" \\" for row in (headings, *cells))
    begin = rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}"
    return "\n".join((begin, r"\toprule", first, r"\midrule", *others, r"\bottomrule", r"\end{tabular}"))
