"""What the page reads off a sweep of a record: growth, fixed costs, the fastest method, and what "auto" picks."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

Sweep = Mapping[str, Any]


class Stretch(NamedTuple):
    """Neighbouring lengths that have something in common."""

    first: int
    last: int
    what: str


def medians(sweep: Sweep, way: str) -> dict[int, float]:
    """Give the seconds of a call by length, in order."""
    return {int(length): points[way]["median"] for length, points in sweep["times"].items() if way in points}


def ratio(sweep: Sweep, way: str, length: int) -> float | None:
    """Give the time over the floor's in the same rounds; None if one of them was not measured."""
    return sweep["times"].get(str(length), {}).get(way, {}).get("ratio")


def growth(sweep: Sweep, way: str) -> float | None:
    """Estimate the power of L with which time grew over the last two doublings; None for fewer than three points."""
    seconds = list(medians(sweep, way).values())
    return math.log2(seconds[-1] / seconds[-3]) / 2 if len(seconds) >= 3 else None


def flat_up_to(sweep: Sweep, way: str) -> int | None:
    """Find the largest length up to which every call takes less than twice the time of the shortest one."""
    flat = None
    seconds = medians(sweep, way)
    for length, value in seconds.items():
        if value >= 2 * seconds[min(seconds)]:
            break
        flat = length
    return flat


def memory_a_step(sweep: Sweep, way: str) -> float | None:
    """Give the bytes above the inputs per step, at the longest length; None if they are below a megabyte in all."""
    points = {int(length): value for length, value in sweep["memory"].get(way, {}).items()}
    if not points or points[max(points)] < 1:
        return None
    return points[max(points)] * 2**20 / max(points)


def quickest(sweep: Sweep) -> list[Stretch]:
    """Find the fastest method apart from the floor, length by length; `what` is "" if no other was measured."""
    best = {}
    for length, points in sweep["times"].items():
        ways = {way: point["median"] for way, point in points.items() if way != sweep["floor"]}
        best[int(length)] = min(ways, key=lambda way: ways[way]) if ways else ""
    return stretches(best)


def stretches(by_length: Mapping[int, str]) -> list[Stretch]:
    """Join neighbouring lengths that have the same value."""
    found = []
    for what, group in groupby(by_length.items(), key=lambda pair: pair[1]):
        lengths = [length for length, _ in group]
        found.append(Stretch(lengths[0], lengths[-1], what))
    return found


def auto_over_quickest(sweep: Sweep) -> dict[int, tuple[str, str, float]]:
    """Give by length: the method that "auto" picks, the fastest mode's, and the time of the first over the second."""
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
    """Give the traffic of the floor by length."""
    floor = medians(sweep, sweep["floor"])
    return {length: sweep["floor_bytes"] * length / seconds / 1e9 for length, seconds in floor.items()}


def spread(record: Mapping[str, Any]) -> tuple[int, int]:
    """Count the points with quartiles more than a quarter of the median apart, and all points."""
    points = [point for sweep in record["sweeps"].values() for at in sweep["times"].values() for point in at.values()]
    return sum(point["high"] - point["low"] > point["median"] / 4 for point in points), len(points)
