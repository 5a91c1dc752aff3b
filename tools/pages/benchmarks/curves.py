"""What the page reads off a sweep of a record: growth, fixed costs, the quickest way, and what "auto" takes."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

Sweep = Mapping[str, Any]


class Stretch(NamedTuple):
    """Neighbouring lengths of which one thing is true."""

    first: int
    last: int
    what: str


def medians(sweep: Sweep, way: str) -> dict[int, float]:
    """Seconds of a call by length, in order."""
    return {int(length): points[way]["median"] for length, points in sweep["times"].items() if way in points}


def ratio(sweep: Sweep, way: str, length: int) -> float | None:
    """Time over the floor's in the same rounds; None where one of them was not measured."""
    return sweep["times"].get(str(length), {}).get(way, {}).get("ratio")


def growth(sweep: Sweep, way: str) -> float | None:
    """The power of L with which time grew over the last two doublings; None for fewer than three points."""
    seconds = list(medians(sweep, way).values())
    return math.log2(seconds[-1] / seconds[-3]) / 2 if len(seconds) >= 3 else None


def flat_up_to(sweep: Sweep, way: str) -> int | None:
    """The largest length up to which every call takes less than twice the time of the shortest one."""
    flat = None
    seconds = medians(sweep, way)
    for length, value in seconds.items():
        if value >= 2 * seconds[min(seconds)]:
            break
        flat = length
    return flat


def memory_a_step(sweep: Sweep, way: str) -> float | None:
    """Bytes above the inputs for each step at the longest length; None where that is below a megabyte."""
    points = {int(length): value for length, value in sweep["memory"].get(way, {}).items()}
    if not points or points[max(points)] < 1:
        return None
    return points[max(points)] * 2**20 / max(points)


def quickest(sweep: Sweep) -> list[Stretch]:
    """The quickest way but for the floor, length by length; `what` is "" where nothing else was measured."""
    best = {}
    for length, points in sweep["times"].items():
        ways = {way: point["median"] for way, point in points.items() if way != sweep["floor"]}
        best[int(length)] = min(ways, key=lambda way: ways[way]) if ways else ""
    return stretches(best)


def stretches(by_length: Mapping[int, str]) -> list[Stretch]:
    """Join neighbouring lengths of which the same is said."""
    found = []
    for what, group in groupby(by_length.items(), key=lambda pair: pair[1]):
        lengths = [length for length, _ in group]
        found.append(Stretch(lengths[0], lengths[-1], what))
    return found


def auto_over_quickest(sweep: Sweep) -> dict[int, tuple[str, str, float]]:
    """By length: the way of the mode that "auto" takes, the quickest mode's, and the first one's time over it."""
    found = {}
    for length, mode in sweep["auto"].items():
        points = {
            way: point["median"] for way, point in sweep["times"][length].items() if way in sweep["modes"].values()
        }
        way = sweep["modes"].get(mode)
        if way in points:
            best = min(points, key=lambda name: points[name])
            found[int(length)] = (way, best, points[way] / points[best])
    return found


def gigabytes_a_second(sweep: Sweep) -> dict[int, float]:
    """What the floor moves, by length."""
    floor = medians(sweep, sweep["floor"])
    return {length: sweep["floor_bytes"] * length / seconds / 1e9 for length, seconds in floor.items()}


def spread(record: Mapping[str, Any]) -> tuple[int, int]:
    """How many points have quartiles more than a quarter of the median apart, and how many points there are."""
    points = [point for sweep in record["sweeps"].values() for at in sweep["times"].values() for point in at.values()]
    return sum(point["high"] - point["low"] > point["median"] / 4 for point in points), len(points)
