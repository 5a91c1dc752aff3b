"""What long runs want: stopping early, and settings that are refused."""

import io
from typing import NamedTuple

import pytest
from rich.console import Console


class Scores(NamedTuple):
    loss: float
    accuracy: float | None = None


def quiet() -> Console:
    return Console(file=io.StringIO())


def scorer(*losses):
    left = iter(losses)
    return lambda model, source: Scores(float(next(left)))


@pytest.mark.parametrize(("losses", "step"), [((5, 4, 4.5, 4.2, 3, 3, 3, 3), 4), ((5, 4, 4.5, 3, 3.5, 3.2, 9, 9), 6)])
def test_a_run_stops_when_evaluations_no_longer_improve(make_trainer, losses, step):
    trainer = make_trainer(scorer=scorer(*losses), epochs=1, eval_every=1, patience=2)
    trainer.fit(quiet())
    assert trainer.position.step == step
    assert trainer.finished
    again = make_trainer(scorer=scorer(), epochs=1, eval_every=1, patience=2)
    again.resume("last")
    assert again.finished


@pytest.mark.parametrize(
    ("monitor", "enough", "step"), [("loss", 3.0, 4), ("loss", 0.1, 8), ("accuracy", 0.5, 3), ("accuracy", 1.0, 8)]
)
def test_a_run_stops_when_it_is_good_enough(make_trainer, monitor, enough, step):
    scores = iter(zip((5, 4, 4.5, 3, 2, 2, 2, 2), (0, 0.25, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5), strict=True))
    settings = {"max_steps": 8, "eval_every": 1, "monitor": monitor, "stop_at": enough}
    trainer = make_trainer(scorer=lambda model, source: Scores(*map(float, next(scores))), **settings)
    trainer.fit(quiet())
    assert trainer.position.step == step
    again = make_trainer(**settings)
    again.resume("last")
    assert again.finished


def test_recomputing_blocks_and_pieces_do_not_go_together(make_trainer):
    with pytest.raises(ValueError, match=r"^training\.checkpoint_blocks is True; expected false with"):
        make_trainer(checkpoint_blocks=True, sequence_parallel=2)


def test_pieces_need_as_many_ranks(make_trainer):
    with pytest.raises(
        ValueError, match=r"^training\.sequence_parallel is 2; expected a number that divides the 1 ranks"
    ):
        make_trainer(sequence_parallel=2)
