"""A made-up record of a measurement."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.pages.benchmarks.page import BenchmarksPage

DOCS = Path(__file__).parents[4] / "docs"
LENGTHS = [2**power for power in range(7, 13)]


def _points(seconds: dict[int, float], floor: dict[int, float]) -> dict[str, dict[str, float]]:
    return {
        str(length): {
            "median": value,
            "low": 0.95 * value,
            "high": 1.05 * value,
            "ratio": value / floor[length],
            "rounds": 5,
        }
        for length, value in seconds.items()
    }


def _record() -> dict:
    floor = {length: length * 1e-6 for length in LENGTHS}
    curves = {
        "floor": floor,
        'mode "chunk"': {length: max(2e-3, length * 4e-6) for length in LENGTHS},  # flat up to 2^9
        'mode "scan"': {length: length * 1.2e-5 for length in LENGTHS},
        "square": {length: length**2 * 1e-6 for length in LENGTHS if length <= 2**10},
    }
    by_way = {way: _points(seconds, floor) for way, seconds in curves.items()}
    sweep = {
        "title": "A sweep",
        "shape": "(1, L, 3)",
        "about": "About it.",
        "floor": "floor",
        "floor_bytes": 12_000,
        "ways": dict.fromkeys(curves, "its cost") | {"jax": "elsewhere"},
        "modes": {"chunk": 'mode "chunk"', "scan": 'mode "scan"'},
        "absent": ["jax"],
        "auto": dict.fromkeys(map(str, LENGTHS), "chunk"),
        "memory": {
            "floor": dict.fromkeys(map(str, LENGTHS), 0.0),
            'mode "chunk"': {str(length): length / 2**9 for length in LENGTHS},
            'mode "scan"': {str(length): length / 2**4 for length in LENGTHS},
            "square": {str(length): length**2 / 2**10 for length in LENGTHS if length <= 2**11},
        },
        "memory_done": list(curves),
        "stops": {"square": {"length": 2**11, "reason": "time", "estimate": 4.194}},
        "times": {
            str(length): {way: by_way[way][str(length)] for way in curves if str(length) in by_way[way]}
            for length in LENGTHS
        },
    }
    return {
        "format": 1,
        "command": "python -m tools.pages benchmarks --longest 12",
        "date": "2031-02-03",
        "commit": "0123456789",
        "machine": {"cpu": "A processor", "cores": 2, "threads": 2, "memory_gb": 24, "cuda": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "lengths": LENGTHS,
        "limits": {"seconds": 2.0, "gigabytes": 6.0},
        "budget_seconds": 0.4,
        "sweeps": {"one": sweep},
    }


@pytest.fixture
def record() -> dict:
    """One made-up sweep: a floor, two modes that grow with L, one of them flat at first, and a way as L^2."""
    return copy.deepcopy(_record())


@pytest.fixture
def render() -> Callable[[dict], str]:
    """render(record): the page of a record, with the sections of docs/benchmarks."""
    return lambda record: BenchmarksPage(DOCS / "benchmarks", record, draw=False).render()


@pytest.fixture
def sweep(record) -> dict:
    return record["sweeps"]["one"]
