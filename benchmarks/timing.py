"""Times of several functions measured side by side, so that their ratios hold on a noisy machine."""

import statistics
import time
from collections.abc import Callable, Mapping


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 25, warm_up: int = 2
) -> dict[str, list[float]]:
    """Call every function once a round, in turn; return each one's seconds per round, without the first `warm_up`."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(warm_up + rounds):
        for name, function in functions.items():
            elapsed = seconds_of(function)
            if round_ >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(seconds: list[float], floor: list[float]) -> float:
    """The median over the rounds of one function's time over another's in the same round."""
    return statistics.median(one / other for one, other in zip(seconds, floor))


def quartiles(seconds: list[float]) -> str:
    """Median with first and third quartile, in milliseconds."""
    low, middle, high = (1e3 * q for q in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
