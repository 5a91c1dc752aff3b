"""The page's words and tables; every number in them comes from the record."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from benchmarks.page import curves
from benchmarks.page.curves import Stretch, Sweep
from benchmarks.page.draw import RESOLVED_MEGABYTES
from benchmarks.page.measure import LEAST_ROUNDS, MOST_ROUNDS

Record = Mapping[str, Any]

TABLE_LENGTHS = (2**10, 2**14, 2**17, 2**20)
AS_THE_FLOOR = 1.5
"""Up to this many times the floor's time, we call a method memory-bound, as the floor is."""
FASTER_THAN_L = 1.5
"""From this power of L up, we say that time grows faster than L."""
NEAR = 1.1
"""Up to this ratio, we call the mode that "auto" picks as fast as the fastest."""


def page(record: Record, figures: Mapping[str, str]) -> str:
    """docs/benchmarks.md, given the names of the figures in figures/ by sweep."""
    parts = [_head(record), _method(record)]
    parts += [_section(record, record["sweeps"][key], figures[key]) for key in figures]
    return "\n\n".join([*parts, _open(record)]) + "\n"


def _head(record: Record) -> str:
    machine, versions = record["machine"], record["versions"]
    lengths = record["lengths"]
    about = f"""Time and memory of the library's modes, and of other ways to compute the same thing, from
        L = {power(lengths[0])} to {power(lengths[-1])}. The command below writes this page, and every number in it
        comes from [figures/benchmarks.json](figures/benchmarks.json): do not edit it by hand."""
    software = ", ".join(f"{name} {value}" for name, value in versions.items())
    return f"""# Time and memory over the length of a sequence

    make bench-page                         # measures, then writes this page
    python -m benchmarks.page --draw-only   # rewrites it from figures/benchmarks.json

{_paragraph(about)}

| | |
|---|---|
| measured | {record["date"]}, commit {record["commit"]}, `{record["command"]}` |
| machine | {machine["cpu"]}, {_count(machine["cores"], "core")}, {machine["memory_gb"]} GB of memory |
| threads | {machine["threads"]} |
| software | {software} |"""


def _method(record: Record) -> str:
    limits = record["limits"]
    return _paragraph(
        f"""Batch 1, float32. At each length, all methods are timed in turn, round by round in one process, after a
        warm-up. Points are medians, bars are quartiles, and a ratio is the median of the ratios within a round. A
        method gets about {record["budget_seconds"]:g} s per length, and at least {LEAST_ROUNDS} and at most
        {MOST_ROUNDS} rounds. Because methods take turns, each call finds the caches as the previous call left them.
        Memory is the peak resident memory of a separate process during one call, above what was resident before the
        call with the inputs in place; figures below {RESOLVED_MEGABYTES:g} MB mean nothing. A curve ends before a
        call that, judging by the growth so far, would take more than {limits["seconds"]:g} s or, with its inputs,
        {limits["gigabytes"]:g} GB. The floor, `torch.add(a, b, out=c)`, reads two tensors of the inputs' size and
        writes one."""
    )


def _section(record: Record, sweep: Sweep, figure: str) -> str:
    sentences = [_quickest(sweep), _bounds(sweep), _bandwidth(sweep), _auto(sweep), _absent(sweep)]
    return "\n\n".join(
        [
            f"## {sweep['title']}",
            _paragraph(f"`{sweep['shape']}`. {sweep['about']}"),
            f"![{sweep['title']}: time and memory over L](figures/{figure})",
            _ratios(record, sweep),
            _details(sweep),
            "\n".join(_item(sentence) for sentence in sentences if sentence),
        ]
    )


def _ratios(record: Record, sweep: Sweep) -> str:
    lengths = [length for length in TABLE_LENGTHS if length in record["lengths"]] or record["lengths"][-1:]
    floor = curves.medians(sweep, sweep["floor"])
    rows = [[f"{sweep['floor']}, ms", *(_milliseconds(floor.get(length)) for length in lengths)]]
    for way in _measured(sweep):
        if way != sweep["floor"]:
            ratios = [curves.ratio(sweep, way, length) for length in lengths]
            rows.append([way, *("-" if value is None else _number(value) for value in ratios)])
    return _table(["time over the floor's", *(f"L = {power(length)}" for length in lengths)], rows)


def _details(sweep: Sweep) -> str:
    rows = []
    for way in _measured(sweep):
        seconds, flat = curves.medians(sweep, way), curves.flat_up_to(sweep, way)
        exponent, memory = curves.growth(sweep, way), curves.memory_a_step(sweep, way)
        rows.append(
            [
                way,
                _milliseconds(seconds[min(seconds)]),
                "-" if flat is None else power(flat),
                "-" if exponent is None or flat == max(seconds) else f"L^{exponent:.2f}",
                "-" if memory is None else f"{memory:,.0f}",
                _end(sweep, way, max(seconds)),
                sweep["ways"][way],
            ]
        )
    shortest = min(int(length) for length, points in sweep["times"].items() if points)
    names = ["method", f"ms at {power(shortest)}", "flat up to", "grows as", "bytes per step", "measured up to", "cost"]
    return _table(names, rows)


def _end(sweep: Sweep, way: str, last: int) -> str:
    stop = sweep["stops"].get(way)
    if stop is None:
        return power(last)
    if stop["reason"] == "failure":
        return f"{power(last)}; then the process exited with {stop['estimate']}"
    unit = "s" if stop["reason"] == "time" else "GB"
    return f"{power(last)}; next: about {_number(stop['estimate'])} {unit}"


def _quickest(sweep: Sweep) -> str:
    found = [stretch for stretch in curves.quickest(sweep) if stretch.what]
    return f"Fastest, apart from the floor: {_stretches(found)}." if found else ""


def _bounds(sweep: Sweep) -> str:
    """Which methods are memory-bound, and which grow too fast for long sequences."""
    near, steep = [], []
    for way in _measured(sweep):
        if way == sweep["floor"]:
            continue
        last = max(curves.medians(sweep, way))
        over, exponent = curves.ratio(sweep, way, last), curves.growth(sweep, way)
        if over is not None and over <= AS_THE_FLOOR:
            near.append(f"{way} ({_number(over)} at {power(last)})")
        if exponent is not None and exponent >= FASTER_THAN_L:
            steep.append(f"{way} (L^{exponent:.2f})")
    said = []
    if near:
        said.append(f"Memory-bound like the floor, within {AS_THE_FLOOR:g} times its time: {', '.join(near)}.")
    if steep:
        said.append(f"Growing faster than L at the end of the curve: {', '.join(steep)}.")
    return " ".join(said)


def _bandwidth(sweep: Sweep) -> str:
    speeds = curves.gigabytes_a_second(sweep)
    if not speeds:
        return ""
    best, last = max(speeds, key=lambda length: speeds[length]), max(speeds)
    megabytes = {length: sweep["floor_bytes"] * length / 2**20 for length in (best, last)}
    said = f"The floor is fastest at L = {power(best)}, with {speeds[best]:.0f} GB/s over {_number(megabytes[best])} MB"
    if last == best:
        return said + "."
    return f"{said}; at {power(last)} it reaches {speeds[last]:.0f} GB/s over {_number(megabytes[last])} MB."


def _auto(sweep: Sweep) -> str:
    found = curves.auto_over_quickest(sweep)
    if not found:
        return ""
    taken = curves.stretches({length: way for length, (way, _, _) in found.items()})
    behind = [
        f"{power(length)}, where {best} took 1/{_number(over)} of its time"
        for length, (_, best, over) in found.items()
        if over > NEAR
    ]
    said = f'"auto" picks {_stretches(taken)}'
    if not behind:
        return f"{said}: the fastest measured mode, or within {100 * (NEAR - 1):.0f}% of it, at every length."
    return f"{said}; it is not the fastest mode at L = {'; '.join(behind)}."


def _absent(sweep: Sweep) -> str:
    if not sweep["absent"]:
        return ""
    names = " and ".join(sweep["absent"])
    return f"Not measured, because not installed on this machine: {names} (`make bench-page-peers` includes them)."


def _open(record: Record) -> str:
    wide, points = curves.spread(record)
    card = record["machine"]["cuda"]
    here = f"The machine has a GPU ({card}), but nothing here used it" if card else "No GPU was available"
    lines = [
        f"Figures on a GPU. {here}: nothing on this page shows how fast the Triton kernels are.",
        "Batches of more than one sequence, bfloat16, and more threads than above.",
        f"{wide} of {points} points have quartiles more than a quarter of their median apart, mostly short calls.",
    ]
    missing = sorted({name for sweep in record["sweeps"].values() for name in sweep["absent"]})
    if missing:
        lines.append(f"The curves of {' and '.join(missing)}.")
    return "\n".join(["## Open", "", *map(_item, lines)])


def power(length: int) -> str:
    """2^k for a power of two, else the number."""
    return f"2^{length.bit_length() - 1}" if length & (length - 1) == 0 else f"{length:,}"


def _stretches(found: Sequence[Stretch]) -> str:
    def where(stretch: Stretch) -> str:
        first, last = power(stretch.first), power(stretch.last)
        return f"at {first}" if first == last else f"from {first} to {last}"

    return ", ".join(f"{stretch.what} {where(stretch)}" for stretch in found)


def _measured(sweep: Sweep) -> list[str]:
    return [way for way in sweep["ways"] if curves.medians(sweep, way)]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else _number(1e3 * seconds)


def _number(value: float) -> str:
    """Three digits, never with an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _paragraph(words: str) -> str:
    return fill(" ".join(words.split()), 120, break_long_words=False, break_on_hyphens=False)


def _item(sentence: str) -> str:
    return _paragraph(f"- {sentence}").replace("\n", "\n  ")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
