"""`python -m benchmarks.faults` counts what it should count, and fails when something went wrong."""

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.faults import kills, outcomes
from benchmarks.faults.outcomes import Kind, tally_mutants


def read_text(path):
    return path.read_text()


def refuse(path):
    raise ValueError(f"{path} is damaged; expected what was written")


def kind(read, **options):
    """A file that says "sound"; only its mutants are given to `read`."""

    def read_mutants(path):
        return "sound" if path.read_text() == "sound" else read(path)

    changed = {"changed": lambda content, draw: b"other"}
    return Kind("file", lambda path: path.write_text("sound"), read_mutants, changed, **options)


@pytest.mark.parametrize(
    ("read", "options", "expected"),
    [
        (refuse, {}, outcomes.REFUSED),
        (lambda path: "sound", {}, outcomes.EQUAL),
        (lambda path: "so", {"grows": True}, outcomes.BEGINNING),
        (read_text, {"digest": False}, outcomes.VALID),
        (read_text, {}, outcomes.OTHER),
        (lambda path: torch.tensor([torch.inf]), {"digest": False}, outcomes.OTHER),
        (lambda path: int("x"), {}, outcomes.MUMBLED),
        (lambda path: refuse(f"{path}\n"), {}, outcomes.MUMBLED),
        (lambda path: {}["key"], {}, outcomes.RAISED),
    ],
)
def test_outcomes(tmp_path, read, options, expected):
    tally = tally_mutants(kind(read, **options), tmp_path, 5, seed=0)
    assert tally.counts == Counter({expected: 5})
    assert tally.bad == (5 if expected in outcomes.BAD else 0)
    assert len(tally.examples) == (3 if expected in outcomes.BAD else 0)


def test_a_hang_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "LONGEST", 1)
    assert tally_mutants(kind(lambda path: time.sleep(60)), tmp_path, 1, seed=0).counts == Counter({outcomes.HUNG: 1})


def begin_or_go_on(run):
    run.mkdir(exist_ok=True)
    return 0


def test_kills_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored afterwards
    made = {"right": lambda run: 1, "wrong": lambda run: run.name, "left": lambda run: 1}
    programs = [kills.Program(name, begin_or_go_on, Path.exists, result, "{}/.*.tmp") for name, result in made.items()]
    monkeypatch.setattr(kills, "_programs", lambda folder: programs)
    counts, wrong = kills.tally_kills(tmp_path, 10, 0, ["right", "wrong"])
    assert counts[f"right: {kills.RIGHT}"] == counts[f"wrong: {kills.WRONG}"] == 1
    assert wrong == [f"wrong-1: {kills.WRONG}"]
    (tmp_path / ".half.tmp").touch()
    assert kills.tally_kills(tmp_path, 5, 0, ["left"])[0][f"left: {kills.WRONG}"] == 1
