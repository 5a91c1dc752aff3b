"""Marks are spread along a stream, and bounded."""

import torch

from recurra.serving.model import Place
from recurra.serving.sessions import MOST_A_SESSION, Marks


def places(*numbers: int) -> list[Place]:
    return [Place(torch.zeros(1, 25), (), number) for number in numbers]


def test_the_nearest_mark_is_the_last_one_before():
    marks = Marks(10_000)
    marks.add("a", places(16, 32, 48))
    assert [getattr(marks.nearest("a", at), "n_tokens", None) for at in (15, 16, 40, 99)] == [None, 16, 32, 48]
    marks.cut("a", 32)
    assert marks.nearest("a", 99).n_tokens == 32
    assert marks.nearest("b", 99) is None


def test_too_many_are_thinned_and_reach_over_the_whole_stream():
    marks = Marks(1_000_000)
    for start in range(0, 10_000, 160):
        marks.add("a", places(*range(start + 16, start + 161, 16)))
    assert marks.nearest("a", 10_000).n_tokens > 9_900
    assert marks.nearest("a", 2_000) is not None
    gaps = [at - marks.nearest("a", at).n_tokens for at in range(1_000, 10_000, 100)]
    assert max(gaps) <= 2 * 10_000 / MOST_A_SESSION * 2


def test_bytes_are_bounded_and_the_longest_unused_session_goes_first():
    marks = Marks(600)  # six marks of 100 bytes
    marks.add("a", places(1, 2, 3))
    marks.add("b", places(1, 2, 3))
    marks.nearest("a", 3)
    marks.add("c", places(1, 2))
    assert marks.nearest("b", 9) is None
    assert marks.nearest("a", 9) is not None
    assert marks.nearest("c", 9) is not None
    for name in "abc":
        marks.forget(name)
    assert marks._bytes == 0


def test_a_twin_shares_the_marks_before_the_fork():
    marks = Marks(10_000)
    marks.add("a", places(1, 2, 3))
    marks.copy("a", "b", 2)
    assert marks.nearest("b", 9).n_tokens == 2
    assert marks.nearest("b", 9).state is marks.nearest("a", 2).state
