"""What long runs want: stopping early, and settings that are refused."""

import io
import math
from typing import NamedTuple

import pytest
from rich.console import Console

from recurra.train.metrics import read_metrics


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


def test_patience_counts_evaluations_whatever_is_between_them(make_trainer):
    """The best is of step 3; the evaluations of steps 6 and 7, where the run was to end, were two."""
    first = make_trainer(scorer=scorer(1, 2, 2), max_steps=7, eval_every=3, patience=3)
    first.fit(quiet())
    again = make_trainer(scorer=scorer(2), epochs=2, eval_every=1, patience=3)
    again.resume("last")
    assert not again.finished
    again.fit(quiet())
    assert again.position.step == 8
    assert again.finished


def test_the_evaluation_that_ends_a_run_does_not_swallow_its_last_record(make_trainer):
    trainer = make_trainer(scorer=scorer(1, 2), epochs=1, eval_every=3, log_every=4, patience=1)
    trainer.fit(quiet())
    rows = read_metrics(trainer.folder.metrics)
    assert [(row["step"], bool(row["train_loss"]), bool(row["valid_loss"])) for row in rows] == [
        (3, False, True),
        (4, True, False),
        (6, True, True),
    ]


@pytest.mark.parametrize(
    ("field", "value"), [("patience", 0), ("stop_at", 0.0), ("stop_at", -1.0), ("stop_at", math.nan)]
)
def test_impossible_values_are_refused_by_name(make_trainer, field, value):
    with pytest.raises(ValueError, match=rf"^training\.{field} is "):
        make_trainer(**{field: value})


def test_recomputing_blocks_and_pieces_do_not_go_together(make_trainer):
    with pytest.raises(ValueError, match=r"^training\.checkpoint_blocks is True; expected false with"):
        make_trainer(checkpoint_blocks=True, sequence_parallel=2)


def test_pieces_need_as_many_ranks(make_trainer):
    with pytest.raises(
        ValueError, match=r"^training\.sequence_parallel is 2; expected a number that divides the 1 ranks"
    ):
        make_trainer(sequence_parallel=2)
