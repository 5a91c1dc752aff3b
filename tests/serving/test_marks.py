"""Checkpoints are spread along a stream, and bounded."""

import torch

from recurra.serving.model import StreamState
from recurra.serving.sessions import MOST_CHECKPOINTS, Checkpoints


def states(*numbers: int) -> list[StreamState]:
    return [StreamState(torch.zeros(1, 25), (), number) for number in numbers]


def nearest(checkpoints: Checkpoints, session: str, position: int) -> StreamState | None:
    return next(reversed(checkpoints.up_to(session, position)), None)


def test_the_nearest_checkpoint_is_the_last_one_before():
    checkpoints = Checkpoints(10_000)
    checkpoints.add("a", states(16, 32, 48))
    assert [getattr(nearest(checkpoints, "a", at), "position", None) for at in (15, 16, 40, 99)] == [None, 16, 32, 48]
    checkpoints.cut("a", 32)
    assert nearest(checkpoints, "a", 99).position == 32
    assert nearest(checkpoints, "b", 99) is None


def test_too_many_are_thinned_and_reach_over_the_whole_stream():
    checkpoints = Checkpoints(1_000_000)
    for start in range(0, 10_000, 160):
        checkpoints.add("a", states(*range(start + 16, start + 161, 16)))
    assert nearest(checkpoints, "a", 10_000).position > 9_900
    assert nearest(checkpoints, "a", 2_000) is not None
    gaps = [at - nearest(checkpoints, "a", at).position for at in range(1_000, 10_000, 100)]
    assert max(gaps) <= 2 * 10_000 / MOST_CHECKPOINTS * 2


def test_bytes_are_bounded_and_the_longest_unused_session_goes_first():
    checkpoints = Checkpoints(600)  # six checkpoints of 100 bytes
    checkpoints.add("a", states(1, 2, 3))
    checkpoints.add("b", states(1, 2, 3))
    nearest(checkpoints, "a", 3)
    checkpoints.add("c", states(1, 2))
    assert nearest(checkpoints, "b", 9) is None
    assert nearest(checkpoints, "a", 9) is not None
    assert nearest(checkpoints, "c", 9) is not None
    for name in "abc":
        checkpoints.forget(name)
    assert checkpoints._bytes == 0


def test_a_twin_shares_the_checkpoints_before_the_fork():
    checkpoints = Checkpoints(10_000)
    checkpoints.add("a", states(1, 2, 3))
    checkpoints.add("b", checkpoints.up_to("a", 2))
    assert nearest(checkpoints, "b", 9).position == 2
    assert nearest(checkpoints, "b", 9).model_state is nearest(checkpoints, "a", 2).model_state
