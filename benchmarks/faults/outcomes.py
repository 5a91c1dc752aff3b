"""What becomes of damaged files: each mutant is read in turn, and its outcome counted."""

import math
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.faults.mutants import Mutator, mutants

LONGEST = 10
"""Seconds after which a file that is still being read counts as a hang."""
LONGEST_MESSAGE = 1500

REFUSED = "refused in one sentence"
EQUAL = "read as it was"
BEGINNING = "read up to where it ends"
VALID = "read as another valid file"
MUMBLED = "refused in other words"
RAISED = "raised another exception"
OTHER = "read with other content"
HUNG = f"took over {LONGEST} s"
CRASHED = "ended the process"
GOOD = (REFUSED, EQUAL, BEGINNING, VALID)
BAD = (MUMBLED, RAISED, OTHER, HUNG, CRASHED)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        file: its name.
        write: writes a sound file to a path.
        read: reads the file at a path, as the library does for its users.
        mutators: what it is damaged with, by name.
        digest: whether damage must be found; what people write by hand can be damaged into another valid file, though
            not into one with weights that are not finite.
        grows: whether a file that ends early is a valid one: a log, whose last lines a kill may take.
    """

    file: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    mutators: Mapping[str, Mutator]
    digest: bool = True
    grows: bool = False


@dataclass
class Tally:
    """Outcomes by name, and what was said or done in the first cases of each bad one."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, outcome: str, mutant: str, said: str) -> None:
        """Count one outcome."""
        self.counts[outcome] += 1
        if outcome in BAD and self.counts[outcome] <= 3:
            self.examples.append(f"{outcome}: {mutant}: {said}")

    @property
    def bad(self) -> int:
        """How many outcomes should not have been."""
        return sum(self.counts[outcome] for outcome in BAD)


def tally_mutants(kind: Kind, folder: Path, n: int, seed: int) -> Tally:
    """Write a sound file into `folder`, damage it `n` times, read every mutant, and count the outcomes."""
    path = folder / kind.file
    kind.write(path)
    sound, expected = path.read_bytes(), kind.read(path)
    tally = Tally()
    for mutant in mutants(kind.mutators, sound, n, seed):
        path.write_bytes(mutant.data)
        tally.add(*_outcome(kind, path, expected, mutant.name))
    return tally


def _outcome(kind: Kind, path: Path, expected: Any, name: str) -> tuple[str, str, str]:
    try:
        with _at_most(LONGEST):
            found = kind.read(path)
    except _TooLongError:
        return HUNG, name, ""
    except (ValueError, OSError) as error:
        said = str(error)
        names_it = str(path) in said or str(path.parent) in said
        clear = "\n" not in said and names_it and len(said) < LONGEST_MESSAGE
        return REFUSED if clear else MUMBLED, name, said[:300]
    except Exception as error:
        return RAISED, name, "".join(traceback.format_exception_only(error))[:300]
    if same(found, expected):
        return EQUAL, name, ""
    if kind.grows and same(found, expected[: len(found)]):
        return BEGINNING, name, ""
    return OTHER if kind.digest or not finite(found) else VALID, name, ""


def same(one: Any, other: Any) -> bool:
    """Compare trees of tensors and plain values, digit by digit; NaN is equal to itself."""
    if isinstance(one, Tensor):
        fits = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return fits and bool((one == other).logical_or(one.isnan() & other.isnan()).all())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def finite(tree: Any) -> bool:
    """Say whether all tensors of a tree have only finite numbers."""
    if isinstance(tree, Tensor):
        return bool(tree.isfinite().all())
    if isinstance(tree, dict):
        return all(map(finite, tree.values()))
    return not isinstance(tree, (list, tuple)) or all(map(finite, tree))


class _TooLongError(BaseException):
    """Not an Exception: nothing that reads a file may catch it."""


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
