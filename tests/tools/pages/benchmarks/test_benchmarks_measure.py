import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from tools.pages.__main__ import main
from tools.pages.benchmarks.limits import Limits
from tools.pages.benchmarks.sweeps import FLOOR, SWEEPS

from recurra import gate_loop, linear_scan
from tools.pages.benchmarks import command, measure, memory
from tools.pages.benchmarks import record as records

DOCS = Path(__file__).parents[4] / "docs"


def _fresh(lengths=(8, 16), seconds=10.0) -> dict:
    return records.new(list(lengths), Limits(seconds, gigabytes=1.0), 0.001, "python -m tools.pages benchmarks")


@pytest.fixture
def children(monkeypatch) -> list[str]:
    """Instead of a process for each way: 1 MB a step, at once; gives the ways that were asked for."""
    asked = []

    def fake(key, way, lengths, limits, threads):
        asked.append(way)
        yield from ({"length": length, "megabytes": float(length), "seconds": 0.0} for length in lengths)

    monkeypatch.setattr(memory, "in_a_process", fake)
    return asked


def _silent(what: str, done: int) -> None:
    pass


@pytest.mark.parametrize("key", SWEEPS)
def test_every_way_of_a_sweep_runs(key):
    x = SWEEPS[key].inputs(5)
    assert (x["out"] == 1).all()  # written beforehand, or its pages would count as the floor's memory
    for way in SWEEPS[key].ways.values():
        if way.is_here:
            way.build(x)()


@pytest.mark.parametrize("key", [key for key in SWEEPS if key.startswith("scan")])
def test_all_ways_to_scan_agree(key):
    x = SWEEPS[key].inputs(37)
    x["constant"] = x["a"][0, 0].detach().requires_grad_(x["a"].requires_grad)
    x["a"] = x["constant"].detach().expand_as(x["b"]).clone().requires_grad_(x["a"].requires_grad)
    expected = linear_scan(x["a"], x["b"])
    if x["a"].requires_grad:
        expected = torch.autograd.grad(expected, x["b"], x["gradient"])[0]
    for name, way in SWEEPS[key].ways.items():
        if way.is_here and name != FLOOR:
            found = way.build(x)()
            found = torch.from_numpy(found.__array__()) if not isinstance(found, (tuple, torch.Tensor)) else found
            found = found[1] if isinstance(found, tuple) else found  # the gradient of b
            torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("key", ["gate-loop-64x1", "gate-loop-8x64"])
def test_all_modes_give_the_same_gradients(key):
    x = SWEEPS[key].inputs(37)
    inputs = [x[name] for name in "qkva"]
    expected = torch.autograd.grad(gate_loop(*inputs, mode="recurrent")[0], inputs, x["gradient"])
    ways = {name: way for name, way in SWEEPS[key].ways.items() if name.startswith("mode")}
    assert len(ways) >= 4
    for name, way in ways.items():
        for one, other in zip(way.build(x)(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=name)


def test_a_tiny_sweep_is_measured_kept_and_not_measured_twice(children):
    record, kept, done = _fresh(), [], []
    for _ in range(2):
        measure.measure(record, ["scan-8-forward"], lambda: kept.append(1), lambda what, n: done.append(n))
        assert sum(done) == measure.n_points(record, ["scan-8-forward"])
        done.clear()
    sweep = record["sweeps"]["scan-8-forward"]
    here = [way for way in sweep["ways"] if way not in sweep["absent"]]
    assert children == here == sweep["memory_done"]
    assert len(kept) == len(here) + 2
    assert [list(points) for points in sweep["times"].values()] == [here, here]
    point = sweep["times"]["16"][FLOOR]
    assert point["low"] <= point["median"] <= point["high"]
    assert point["ratio"] == 1
    assert measure.LEAST_ROUNDS <= point["rounds"] <= measure.MOST_ROUNDS


def test_after_an_interruption_only_what_is_missing_is_measured(children, tmp_path):
    record, path = _fresh(), tmp_path / "kept.json"

    def keep() -> None:
        records.save(record, path)
        if "8" in record["sweeps"]["scan-8-forward"]["times"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.measure(record, ["scan-8-forward"], keep, _silent)
    children.clear()
    record = records.resume(path, _fresh())
    first = record["sweeps"]["scan-8-forward"]["times"]["8"]
    assert "16" not in record["sweeps"]["scan-8-forward"]["times"]
    measure.measure(record, ["scan-8-forward"], lambda: None, _silent)
    assert children == []
    assert record["sweeps"]["scan-8-forward"]["times"]["8"] == first
    assert FLOOR in record["sweeps"]["scan-8-forward"]["times"]["16"]


def test_a_measurement_goes_on_only_with_the_same_settings(tmp_path):
    path = tmp_path / "kept.json"
    records.save(_fresh(), path)
    with pytest.raises(ValueError, match=r"lengths is \[8, 16, 32\]; expected \[8, 16\], as in"):
        records.resume(path, _fresh((8, 16, 32)))
    path.write_text("{}")
    with pytest.raises(ValueError, match="is None; expected 1"):
        records.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        records.load(path)


def test_a_curve_ends_before_a_call_that_takes_too_long(children):
    record = _fresh((8, 16, 32), seconds=1e-9)
    measure.measure(record, ["scan-8-forward"], lambda: None, _silent)
    sweep = record["sweeps"]["scan-8-forward"]
    assert [len(points) > 0 for points in sweep["times"].values()] == [True, False, False]
    assert sweep["stops"]["linear_scan"]["length"] == 16
    assert sweep["stops"]["linear_scan"]["reason"] == "time"


def test_where_only_the_floor_is_left_nothing_is_timed(children, monkeypatch):
    record = _fresh()
    sweep = record["sweeps"]["scan-8-forward"] = records.new_sweep("scan-8-forward")
    sweep["memory"] = {FLOOR: {"8": 0.0, "16": 0.0}, "linear_scan": {"8": 1.0}}
    for length in record["lengths"]:
        measure.measure_times(record, "scan-8-forward", length)
    assert list(sweep["times"]["8"]) == [FLOOR, "linear_scan"]
    assert sweep["times"]["16"] == {}


def test_slow_calls_take_part_in_fewer_rounds():
    order = []
    calls = {"slow": lambda: (order.append("slow"), time.sleep(0.02)), "quick": lambda: order.append("quick")}
    found = measure.side_by_side(calls, budget=0.1)
    assert 3 <= len(found["slow"]) <= 5
    assert len(found["quick"]) == 31
    assert min(found["slow"]) >= 0.02
    assert order[:4] == ["slow", "slow", "quick", "quick"]  # two warm-up calls each
    assert order[4:8] == ["slow", "quick", "slow", "quick"]


def test_memory_of_a_process_of_its_own():
    lengths = [2**13, 2**12, 2**7]  # downwards, so that a peak that is not set back shows
    found = list(memory.in_a_process("scan-64-both", "linear_scan", lengths, Limits(10.0, 1.0), 1))
    assert [point["length"] for point in found] == lengths
    # h and two gradients at once, of which h is gone in the end: 2^12 x 64 float32 are 1 MB
    assert found[0]["megabytes"] == pytest.approx(6, abs=0.4)
    assert found[1]["megabytes"] == pytest.approx(3, abs=0.4)
    assert found[2]["megabytes"] < 0.4


def test_a_limit_ends_the_memory_curve():
    stop = {"length": 64, "reason": "memory", "estimate": 2.0}
    assert memory._why_stop(64, 0.1, 2048.0, Limits(1.0, 1.5)) == stop
    assert memory._why_stop(64, 1.9, 1.0, Limits(1.0, 1.5)) is None
    assert memory._why_stop(64, 2.1, 1.0, Limits(1.0, 1.5)) == {"length": 64, "reason": "time", "estimate": 2.1}


def test_a_process_that_fails_at_once_is_an_error(capfd, monkeypatch, tmp_path):
    wanted = ("scan-64-forward", "no such way", [8], Limits(1.0, 1.0))
    with pytest.raises(KeyError, match="no such way"):
        list(memory.measure(*wanted))
    python = tmp_path / "python"  # which fails without importing torch first
    python.write_text("#!/bin/sh\necho KeyError >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="measuring the memory of no such way"):
        list(memory.in_a_process(*wanted, 1))
    assert "KeyError" in capfd.readouterr().err


def test_the_command_measures_draws_and_draws_again(children, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(command, "keep_large_blocks", lambda: True)  # for a process of its own
    threads = torch.get_num_threads()
    docs, kept = tmp_path / "docs", tmp_path / "kept.json"
    shutil.copytree(DOCS / "benchmarks" / "sections", docs / "benchmarks" / "sections")
    given = [
        "benchmarks",
        "--shortest",
        "3",
        "--longest",
        "4",
        "--only",
        "scan-8-forward",
        "--budget",
        "0.001",
        "--threads",
        "1",
    ]
    places = ["--threads", "1", "--docs", str(docs), "--kept", str(kept)]
    try:
        assert main([*given, *places]) == 0
        page = (docs / "benchmarks.md").read_text()
        options = "--only scan-8-forward --threads 1 --shortest 3 --longest 4 --budget 0.001"
        assert f"`python -m tools.pages benchmarks {options}`" in page
        assert (docs / "figures" / "benchmarks-scan-8-forward.png").exists()
        (docs / "benchmarks.md").unlink()
        assert main(["benchmarks", "--draw-only", "--docs", str(docs)]) == 0
        assert (docs / "benchmarks.md").read_text() == page
        assert main([*given, *places, "--resume", "--seconds", "9"]) == 2
        assert "limits is {'seconds': 9.0" in capfd.readouterr().err
        monkeypatch.setattr(command, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*given, *places]) == 130
        assert "continue with --resume" in capfd.readouterr().err
    finally:
        torch.set_num_threads(threads)
