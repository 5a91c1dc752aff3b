"""Tables and sentences of the benchmarks page; every number comes from the record."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.pages.benchmarks import curves
from tools.pages.benchmarks.curves import Stretch, Sweep
from tools.pages.markdown import short, table

Record = Mapping[str, Any]

TABLE_LENGTHS = (2**10, 2**14, 2**17, 2**20)
AS_THE_FLOOR = 1.5
"""Up to this many times the floor's time, we call a method memory-bound, as the floor is."""
FASTER_THAN_L = 1.5
"""From this power of L up, we say that time grows faster than L."""
NEAR = 1.1
"""Up to this ratio, we call the mode that "auto" picks as fast as the fastest."""


def machine_table(record: Record) -> str:
    """Tabulate what the record was measured with."""
    machine, cores = record["machine"], record["machine"]["cores"]
    rows = {
        "measured": f"{record['date']}, commit {record['commit']}, `{record['command']}`",
        "machine": f"{machine['cpu']}, {cores} core{'s' if cores != 1 else ''}, {machine['memory_gb']} GB of memory",
        "threads": str(machine["threads"]),
        "software": ", ".join(f"{name} {value}" for name, value in record["versions"].items()),
    }
    return table(["", ""], rows.items())


def ratios_table(record: Record, sweep: Sweep) -> str:
    """Tabulate the time of each method over the floor's, at some lengths."""
    lengths = [length for length in TABLE_LENGTHS if length in record["lengths"]] or record["lengths"][-1:]
    floor = curves.medians(sweep, sweep["floor"])
    rows = [[f"{sweep['floor']}, ms", *(_milliseconds(floor.get(length)) for length in lengths)]]
    for way in _measured(sweep):
        if way != sweep["floor"]:
            ratios = [curves.ratio(sweep, way, length) for length in lengths]
            rows.append([way, *(short(value) for value in ratios)])
    return table(["time over the floor's", *(f"L = {power(length)}" for length in lengths)], rows)


def details_table(sweep: Sweep) -> str:
    """Tabulate how the time and memory of each method grow, and where its curve ends."""
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
    return table(names, rows)


def _end(sweep: Sweep, way: str, last: int) -> str:
    stop = sweep["stops"].get(way)
    if stop is None:
        return power(last)
    if stop["reason"] == "failure":
        return f"{power(last)}; then the process exited with {stop['estimate']}"
    unit = "s" if stop["reason"] == "time" else "GB"
    return f"{power(last)}; next: about {short(stop['estimate'])} {unit}"


def sentences(sweep: Sweep) -> list[str]:
    """Say in words what the numbers of a sweep show."""
    said = [_quickest(sweep), _bounds(sweep), _bandwidth(sweep), _auto(sweep), _absent(sweep)]
    return [sentence for sentence in said if sentence]


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
            near.append(f"{way} ({short(over)} at {power(last)})")
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
    said = f"The floor is fastest at L = {power(best)}, with {speeds[best]:.0f} GB/s over {short(megabytes[best])} MB"
    if last == best:
        return said + "."
    return f"{said}; at {power(last)} it reaches {speeds[last]:.0f} GB/s over {short(megabytes[last])} MB."


def _auto(sweep: Sweep) -> str:
    found = curves.auto_over_quickest(sweep)
    if not found:
        return ""
    taken = curves.stretches({length: way for length, (way, _, _) in found.items()})
    behind = [
        f"{power(length)}, where {best} took 1/{short(over)} of its time"
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


def power(length: int) -> str:
    """Show a power of two as 2^k, and any other number as it is."""
    return f"2^{length.bit_length() - 1}" if length & (length - 1) == 0 else f"{length:,}"


def _stretches(found: Sequence[Stretch]) -> str:
    def where(stretch: Stretch) -> str:
        first, last = power(stretch.first), power(stretch.last)
        return f"at {first}" if first == last else f"from {first} to {last}"

    return ", ".join(f"{stretch.what} {where(stretch)}" for stretch in found)


def _measured(sweep: Sweep) -> list[str]:
    return [way for way in sweep["ways"] if curves.medians(sweep, way)]


def _milliseconds(seconds: float | None) -> str:
    return short(None if seconds is None else 1e3 * seconds)
