"""Markdown: tables, paragraphs, list items, and numbers as they are shown."""

import math
from collections.abc import Iterable, Sequence
from textwrap import fill

NOTHING = "-"
"""Shown for what was not measured."""
WIDTH = 120
"""Of a line of prose."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells that do not contain |."""
    head, *others = ["| " + " | ".join(cells) + " |" for cells in [heads, *rows]]
    return "\n".join([head, "|---" * len(heads) + "|", *others])


def paragraph(words: str) -> str:
    """Join the words of a paragraph and break it into lines; it ends with a line feed."""
    return fill(" ".join(words.split()), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def item(sentence: str) -> str:
    """Make a list item, broken into lines."""
    return paragraph(f"- {sentence}").rstrip("\n").replace("\n", "\n  ")


def show(number: float | None, digits: int = 0) -> str:
    """Show a number with this many digits after the point and commas between thousands; a dash for none."""
    return NOTHING if number is None or math.isnan(number) else f"{number:,.{digits}f}"


def short(number: float | None) -> str:
    """Show a number with about three digits and never an exponent; a dash for none."""
    if number is None:
        return NOTHING
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"
