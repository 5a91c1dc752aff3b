"""The scans, drawn: what `associative_scan` combines with what, level by level.

The scan itself is watched. Its elements carry the interval of the sequence that they stand for, so every call of the
operator says which intervals it joined, and the figure is of the code that runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recurra.ops.scan.reference import associative_scan

EXAMPLE = (3, 1, 7, 0, 4, 1, 6, 3)
"""The numbers of the notes."""
_COLUMN, _ROW, _RADIUS = 76, 62, 19  # pixels
_LEFT, _TOP = 132, 34

Interval = tuple[int, int]


@dataclass(frozen=True)
class Join:
    """One application of the operator: what stands for `earlier` and `later` becomes `value`, of `whole`."""

    earlier: Interval
    later: Interval
    value: int

    @property
    def whole(self) -> Interval:
        """The interval that the result stands for."""
        return self.earlier[0], self.later[1]


def watch(method: str, numbers: tuple[int, ...] = EXAMPLE) -> list[list[Join]]:
    """Run a scan of a sum; return the joins of each call of its operator, in order."""
    calls: list[list[Join]] = []

    def combine(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        value = earlier[0] + later[0]
        rows = [torch.stack(part, -1)[0].tolist() for part in (earlier[1:], later[1:])]
        joins = [Join(tuple(one), tuple(two), int(v)) for one, two, v in zip(*rows, value[0].tolist())]
        if joins:
            calls.append(joins)
        return value, earlier[1], later[2]

    places = torch.arange(len(numbers))[None]
    associative_scan(combine, (torch.tensor([numbers]), places, places), method=method)
    return calls


def draw(method: str, upto: int | None = None, *, titles: tuple[str, ...] = ()) -> str:
    """Draw the first `upto` calls of a scan as an SVG, the last of them in colour; None draws all, none in colour."""
    calls = watch(method)
    shown = calls if upto is None else calls[:upto]
    at: dict[Interval, tuple[int, int]] = {(n, n): (n, 0) for n in range(len(EXAMPLE))}
    edges, nodes = [], [_node(n, 0, value, "leaf") for n, value in enumerate(EXAMPLE)]
    labels = [_label(0, "input")]
    for row, joins in enumerate(shown, 1):
        kind = "now" if row == upto else "done"
        drawn = {}
        for join in joins:
            place = join.whole[1], row
            edges += [_edge(at[part], place, kind) for part in (join.earlier, join.later)]
            nodes.append(_node(*place, join.value, f"{kind} prefix" if join.whole[0] == 0 else kind))
            drawn[join.whole] = place
        at |= drawn
        labels.append(_label(row, titles[row - 1] if titles else f"step {row}"))
    width = _LEFT + _COLUMN * len(EXAMPLE)
    height = _TOP + _ROW * len(calls) + _RADIUS + 10
    about = f"{method.replace('_', '-')} scan of {len(EXAMPLE)} numbers, {len(shown)} of {len(calls)} steps"
    return (
        f'<svg class="scan" viewBox="0 0 {width} {height}" role="img" aria-label="{about}">'
        + "".join([*edges, *nodes, *labels])
        + "</svg>"
    )


def _xy(column: int, row: int) -> tuple[int, int]:
    return _LEFT + _COLUMN * column + _COLUMN // 2, _TOP + _ROW * row


def _node(column: int, row: int, value: int, kind: str) -> str:
    x, y = _xy(column, row)
    return f'<g class="{kind}"><circle cx="{x}" cy="{y}" r="{_RADIUS}"/><text x="{x}" y="{y + 5}">{value}</text></g>'


def _edge(start: tuple[int, int], end: tuple[int, int], kind: str) -> str:
    (x1, y1), (x2, y2) = _xy(*start), _xy(*end)
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2 - _RADIUS}"/>'


def _label(row: int, text: str) -> str:
    return f'<text class="label" x="8" y="{_TOP + _ROW * row + 5}">{text}</text>'
