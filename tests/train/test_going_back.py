"""Going back to the best checkpoint, and what a run leaves that has none of steps, no scores or a loss that blew up."""

import io

import pytest
import torch
from rich.console import Console

from recurra.cli.train import _result
from recurra.train.checkpoint import load_checkpoint
from recurra.train.evaluate import EvaluationResult
from recurra.train.loop import TrainingDiverged
from recurra.train.run import staleness


def quiet():
    return Console(file=io.StringIO())


def scorer(*losses):
    """An evaluation that gives these losses, one after the other."""
    left = iter(losses)
    return lambda model, source: EvaluationResult(next(left), 1.0, 1.0, 0.5, 10, 1.0, 10.0)


@pytest.fixture
def settings():
    return {"eval_every": 1, "save_every": 2, "keep_checkpoints": 2}


@pytest.fixture
def ended(make_trainer, settings):
    """Six updates, the third of which was the best; checkpoints of the fourth and the sixth are kept."""
    trainer = make_trainer(max_steps=6, scorer=scorer(3.0, 2.0, 1.0, 2.0, 3.0, 4.0), **settings)
    trainer.fit(quiet())
    return trainer


def test_a_run_that_went_back_to_its_best_can_be_killed_at_once(ended, make_trainer, settings):
    back = make_trainer(max_steps=8, **settings)
    back.resume("best")
    assert back.position.step == 3
    back.folder.unlock()  # as the end of its process does
    again = make_trainer(max_steps=8, **settings)
    again.resume("last")
    assert again.position.step == 3
    assert [path.stem for path in again.checkpoints.steps()] == ["step-0000000003"]
    best = load_checkpoint(ended.checkpoints.best)["model"]
    assert all(torch.equal(tensor, best[key]) for key, tensor in again.model.state_dict().items())


def test_nothing_is_deleted_before_the_way_back_is_saved(ended, make_trainer, settings, monkeypatch):
    before = ended.checkpoints.steps()
    back = make_trainer(max_steps=8, **settings)
    monkeypatch.setattr(back.checkpoints, "_write", lambda target, payload: 1 / 0)  # a full disk
    with pytest.raises(ZeroDivisionError):
        back.resume("best")
    assert ended.checkpoints.steps() == before


@pytest.mark.parametrize(("length", "losses", "best"), [(6, (1.0, 2.0), (5, 1.0)), (8, (3.5, 3.2, 3.3, 3.4), (6, 3.2))])
def test_a_best_checkpoint_of_an_abandoned_way_is_forgotten(make_trainer, settings, length, losses, best):
    """With another length the rate is another: the best of step 5, after the checkpoint of step 4, is gone."""
    make_trainer(max_steps=6, scorer=scorer(6.0, 5.0, 4.0, 3.0, 1.0, 2.0), **settings).fit(quiet())
    back = make_trainer(max_steps=length, scorer=scorer(*losses), **settings)
    back.resume("previous")
    assert back.checkpoints.best.exists() == (length == 6)
    back.fit(quiet())
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == best
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == best[0]


@pytest.mark.parametrize(("which", "step"), [("previous", 4), ("last", 6)])
def test_a_best_checkpoint_that_cannot_be_read_is_forgotten(ended, make_trainer, settings, which, step):
    content = bytearray(ended.checkpoints.best.read_bytes())
    content[len(content) // 2] ^= 1
    ended.checkpoints.best.write_bytes(content)
    back = make_trainer(max_steps=8, scorer=scorer(*(5.0, 6.0, 7.0, 8.0)[: 8 - step]), **settings)
    back.resume(which)
    console = quiet()
    back.fit(console)
    assert "note: the best checkpoint cannot be read and is removed: " in " ".join(console.file.getvalue().split())
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == (step + 1, 5.0)
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == step + 1


def test_a_run_without_a_validation_says_how_to_score_it(make_trainer):
    trainer = make_trainer(max_steps=4)
    assert _result(trainer) == (
        "finished at step 0, without a validation; score its last checkpoint with:\n"
        f"  recurra eval {trainer.folder.path} --checkpoint last"
    )


def test_a_run_that_diverges_waits_for_the_checkpoint_that_is_being_written(make_trainer, monkeypatch):
    trainer, waited = make_trainer(max_steps=4, scorer=scorer(1.0, float("nan")), eval_every=1), []
    monkeypatch.setattr(trainer.checkpoints, "finish", lambda: waited.append(trainer.position.step))
    with pytest.raises(TrainingDiverged):
        trainer.fit(quiet())
    assert waited == [2]


def killed_in_step(trainer, step):
    """Let a run be killed in an update, which leaves what it has written and no more."""
    update = trainer._update

    def die(*given):
        if trainer.position.step == step - 1:
            raise KeyboardInterrupt
        return update(*given)

    trainer._update = die
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(quiet())


def test_a_best_checkpoint_between_evaluations_keeps_its_score(make_trainer, settings):
    """The best of step 5 is later than the checkpoint of step 4, and the resumed run is not evaluated at step 5."""
    trainer = make_trainer(max_steps=8, scorer=scorer(6.0, 5.0, 4.0, 3.0, 1.0), **settings)
    killed_in_step(trainer, 6)
    back = make_trainer(max_steps=8, scorer=scorer(2.0, 2.5), **(settings | {"eval_every": 2}))
    back.resume("last")
    assert back.position.step == 4
    back.fit(quiet())
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == (5, 1.0)
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == 5


def test_scores_of_a_new_best_checkpoint_are_not_stale(make_trainer, settings):
    """The summary is written with every checkpoint: between two of steps, too."""
    trainer = make_trainer(max_steps=8, scorer=scorer(3.0, 2.0, 1.0), **settings)
    killed_in_step(trainer, 4)
    assert load_checkpoint(trainer.checkpoints.best)["position"]["step"] == 3
    assert staleness(trainer.folder, {"checkpoint": "best", "step": 3}) == ""
    assert staleness(trainer.folder, {"checkpoint": "best", "step": 2})
    assert staleness(trainer.folder, {"checkpoint": "last", "step": 2}) == ""
