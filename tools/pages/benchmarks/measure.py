"""Measure the sweeps: first the memory of each method, then the times of all methods in turn, length by length."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.timing import median_ratio

from tools.pages.benchmarks import memory
from tools.pages.benchmarks.limits import Limits, next_cost
from tools.pages.benchmarks.record import Record, new_sweep
from tools.pages.benchmarks.sweeps import FLOOR, SWEEPS, Call

LEAST_ROUNDS, MOST_ROUNDS = 3, 31

Say = Callable[[str, int], None]
"""Called with what is being measured, and the number of points since the last call."""


def measure(record: Record, keys: Sequence[str], keep: Callable[[], None], say: Say) -> None:
    """Measure what the record lacks of these sweeps; `keep` is called after every step and saves it."""
    for key in keys:
        sweep = record["sweeps"].setdefault(key, new_sweep(key))
        for way in sweep["ways"]:
            if way not in sweep["memory_done"] and way not in sweep["absent"]:
                measure_memory(record, key, way, say)
                keep()
            else:
                say("", len(record["lengths"]))
    for key in keys:
        for length in record["lengths"]:
            if str(length) not in record["sweeps"][key]["times"]:
                say(f"{key}, time at L = {length}", 0)
                measure_times(record, key, length)
                keep()
            say("", len(record["sweeps"][key]["ways"]))


def n_points(record: Record, keys: Sequence[str]) -> int:
    """Count the points that `measure` reports to `say` in all."""
    return sum(2 * len(SWEEPS[key].ways) * len(record["lengths"]) for key in keys)


def measure_memory(record: Record, key: str, way: str, say: Say) -> None:
    """Measure a method's curve of memory, up to the limits."""
    sweep, lengths = record["sweeps"][key], record["lengths"]
    sweep["memory"][way], told = {}, 0
    sweep["stops"].pop(way, None)
    say(f"{key}, memory: {way}", 0)
    limits = Limits(**record["limits"])
    for found in memory.in_a_process(key, way, lengths, limits, record["machine"]["threads"]):
        if "stop" in found:
            sweep["stops"][way] = found["stop"]
        else:
            sweep["memory"][way][str(found["length"])] = found["megabytes"]
            told += 1
            say(f"{key}, memory: {way}", 1)
    sweep["memory_done"].append(way)
    say("", len(lengths) - told)


def measure_times(record: Record, key: str, length: int) -> None:
    """Time all methods whose curves reach a length; nothing if only the floor's does."""
    sweep = record["sweeps"][key]
    going = [way for way in sweep["ways"] if _reaches(record, sweep, way, length)]
    sweep["times"][str(length)] = {}
    if set(going) <= {FLOOR}:
        return
    inputs = SWEEPS[key].inputs(length)
    calls = {way: SWEEPS[key].ways[way].build(inputs) for way in going}
    seconds = side_by_side(calls, record["budget_seconds"])
    for way, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        point = {"median": median, "low": low, "high": high, "rounds": len(times)}
        if FLOOR in seconds:
            point["ratio"] = median_ratio(times, seconds[FLOOR])
        sweep["times"][str(length)][way] = point
    if (auto := SWEEPS[key].auto) is not None:
        sweep["auto"][str(length)] = auto(inputs)
    del inputs, calls
    gc.collect()


def _reaches(record: Record, sweep: Record, way: str, length: int) -> bool:
    """Tell whether memory and time allow this length; if time does not, note that the curve ends."""
    if str(length) not in sweep["memory"].get(way, {}):
        return False
    stop = sweep["stops"].get(way)
    if stop is not None and length >= stop["length"]:
        return False
    so_far = [sweep["times"].get(str(past), {}).get(way) for past in record["lengths"] if past < length]
    medians = [point["median"] for point in so_far if point is not None]
    limit = record["limits"]["seconds"]
    if medians and next_cost(medians) > limit:
        sweep["stops"][way] = {"length": length, "reason": "time", "estimate": next_cost(medians)}
        return False
    return True


def side_by_side(calls: Mapping[str, Call], budget: float) -> dict[str, list[float]]:
    """Time the calls in turn, round by round; return each one's seconds per round. Slow calls get fewer rounds.

    Each call gets about `budget` seconds, at least LEAST_ROUNDS and at most MOST_ROUNDS rounds, after a warm-up of two
    calls (one, if that took longer than the budget).
    """
    rounds = {}
    for name, call in calls.items():
        took = _time(call)
        took = _time(call) if took < budget else took
        rounds[name] = min(max(int(budget / took), LEAST_ROUNDS), MOST_ROUNDS)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(max(rounds.values(), default=0)):
        for name, call in calls.items():
            if round_ < rounds[name]:
                seconds[name].append(_time(call))
    return seconds


def _time(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
