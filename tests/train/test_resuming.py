"""Runs that end early, are killed, resume, go back to an older checkpoint, or lose their folder."""

import json
import shutil

import pytest
import torch
from tests.train.conftest import on_call, quiet, same_weights, scorer

from recurra.train import config as optimizer_registry
from recurra.train.checkpoint import CheckpointError, load_checkpoint
from recurra.train.config import register_optimizer
from recurra.train.evaluate import EvaluationResult
from recurra.train.loop import TrainingDiverged
from recurra.train.metrics import read_metrics
from recurra.train.run import staleness


def summary(trainer) -> dict:
    return json.loads(trainer.folder.summary.read_text())


def losses(trainer) -> list[tuple[float, ...]]:
    rows = read_metrics(trainer.folder.metrics)
    return [(row["step"], row["epoch"], row["train_loss"], row["valid_loss"]) for row in rows]


class PowerCut(Exception):
    """What no one hears a process say."""


def cut():
    raise PowerCut


def before_step(trainer, step, happens):
    """Let something happen before an update."""
    update = trainer._update

    def interrupted():
        if trainer.position.step == step - 1:
            happens()
        return update()

    trainer._update = interrupted


# --- where runs end ---


@pytest.mark.parametrize(("losses", "step"), [((5, 4, 4.5, 4.2, 3, 3, 3, 3), 4), ((5, 4, 4.5, 3, 3.5, 3.2, 9, 9), 6)])
def test_a_run_stops_when_evaluations_no_longer_improve(make_trainer, losses, step):
    trainer = make_trainer(scorer=scorer(*losses), epochs=1, eval_every=1, patience=2)
    trainer.fit(quiet())
    assert trainer.position.step == step
    again = make_trainer(epochs=1, eval_every=1, patience=2)
    again.resume("last")
    assert again.finished


@pytest.mark.parametrize(
    ("monitor", "enough", "step"), [("loss", 3.0, 4), ("loss", 0.1, 8), ("accuracy", 0.5, 3), ("accuracy", 1.0, 8)]
)
def test_a_run_stops_when_it_is_good_enough(make_trainer, monitor, enough, step):
    scores = iter(zip((5.0, 4.0, 4.5, 3.0, 2.0, 2.0, 2.0, 2.0), (0.0, 0.25, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5)))

    def evaluation(model, source):
        loss, accuracy = next(scores)
        return EvaluationResult(loss, 1.0, 1.0, accuracy, 10, 1.0, 10.0)

    settings = {"max_steps": 8, "eval_every": 1, "monitor": monitor, "stop_at": enough}
    trainer = make_trainer(scorer=evaluation, **settings)
    trainer.fit(quiet())
    assert trainer.position.step == step


# --- resuming ---

SETTINGS = {"epochs": 1, "eval_every": 1, "save_every": 2}


def test_every_resumption_is_kept_and_the_curve_has_no_seam(make_trainer):
    whole = make_trainer("whole", **SETTINGS)
    whole.fit(quiet())
    assert summary(whole)["resumed_at"] == []
    make_trainer("parts", scorer=on_call(3), **SETTINGS).fit(quiet())
    second = make_trainer("parts", scorer=on_call(3), **SETTINGS)
    second.resume("last")
    second.fit(quiet())
    assert (summary(second)["finished"], summary(second)["steps"], summary(second)["resumed_at"]) == (False, 6, [3])
    third = make_trainer("parts", **SETTINGS)
    third.resume("last")
    third.fit(quiet())
    assert (summary(third)["finished"], summary(third)["resumed_at"]) == (True, [3, 6])
    assert losses(third) == losses(whole)
    assert summary(third)["validation"] == summary(whole)["validation"]


def test_a_killed_run_has_the_summary_of_its_last_checkpoint(make_trainer):
    with pytest.raises(PowerCut):
        make_trainer(scorer=on_call(6, cut), **SETTINGS).fit(quiet())
    again = make_trainer(scorer=on_call(2, cut), **SETTINGS)
    found = summary(again)
    assert (found["finished"], found["steps"], found["resumed_at"]) == (False, 4, [])
    again.resume("last")
    with pytest.raises(PowerCut):
        again.fit(quiet())
    last = make_trainer(**SETTINGS)
    last.resume("last")
    last.fit(quiet())
    assert summary(last)["resumed_at"] == [4], "the second kill came before a checkpoint: it went on from the same one"


def test_epochs_of_another_length_go_on_with_their_next_batch_and_a_note(make_trainer):
    """More ranks may leave out the small last batch of an epoch; here the text has lost it."""
    settings = SETTINGS | {"epochs": 3}
    trainer = make_trainer(scorer=on_call(2), data={"n_tokens": 3 * 5 * 8 + 1}, **settings | {"eval_every": 7})
    trainer.fit(quiet())
    assert (trainer.position.epoch, trainer.position.batch) == (1, 6)
    shorter = make_trainer(data={"n_tokens": 3 * 5 * 6 + 1}, **settings)
    shorter.experiment.data.n_tokens = trainer.experiment.data.n_tokens  # what a resumed run is compared by
    shorter.resume("last")
    assert (shorter.position.epoch, shorter.position.batch) == (2, 0)
    console = quiet()
    shorter.fit(console)
    assert shorter.position.step == shorter.total_steps == 18
    assert "epochs have 6 updates here, another number before step 14" in console.file.getvalue()


def test_a_run_killed_before_its_first_checkpoint_starts_anew(make_trainer):
    trainer = make_trainer(epochs=1)
    trainer.resume("last")
    assert trainer.position.step == 0
    with pytest.raises(CheckpointError, match=r"checkpoint is previous, but .* has 0; expected"):
        trainer.resume("previous")


class RowMeans(torch.optim.SGD):
    """Keeps a number for each row of a parameter, as Adafactor does, and one of its own beside its parameters."""

    n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            row = self.state[parameter].setdefault("row", torch.zeros(len(parameter)))
            row += parameter.grad.reshape(len(parameter), -1).mean(1) / self.n_steps
            parameter.grad += row.reshape(-1, *[1] * (parameter.ndim - 1))
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "n_steps": self.n_steps}

    def load_state_dict(self, saved):
        self.n_steps = saved["n_steps"]
        super().load_state_dict({key: value for key, value in saved.items() if key != "n_steps"})


def test_a_registered_optimiser_resumes_or_refuses_before_anything_changes(restored, make_trainer):
    restored(optimizer_registry._optimizers)
    register_optimizer("row-means")(RowMeans)
    settings = {"optimizer": {"algorithm": "row-means"}, "epochs": 1, "save_every": 5}
    whole = make_trainer(**settings)
    whole.fit(quiet())
    again = make_trainer(**settings)
    again.resume("previous")
    assert (again.position.step, again.snapshot()["optimizer"]["n_steps"]) == (5, 5)
    again.fit(quiet())
    assert same_weights(whole, again)
    refusing = make_trainer(**settings)
    before = {key: tensor.clone() for key, tensor in refusing.model.state_dict().items()}
    refusing.optimizer.load_state_dict = lambda saved: 1 / 0
    with pytest.raises(ZeroDivisionError):
        refusing.resume("last")
    assert all(torch.equal(tensor, before[key]) for key, tensor in refusing.model.state_dict().items())


# --- going back to the best or an older checkpoint ---

OFTEN = {"eval_every": 1, "save_every": 2, "keep_checkpoints": 2}


@pytest.fixture
def ended(make_trainer):
    """Six updates, the third of which was the best; checkpoints of the fourth and the sixth are kept."""
    trainer = make_trainer(max_steps=6, scorer=scorer(3, 2, 1, 2, 3, 4), **OFTEN)
    trainer.fit(quiet())
    return trainer


def test_a_run_that_went_back_to_its_best_can_be_killed_at_once(ended, make_trainer):
    back = make_trainer(max_steps=8, **OFTEN)
    back.resume("best")
    assert back.position.step == 3
    back.folder.unlock()  # as the end of its process does
    again = make_trainer(max_steps=8, **OFTEN)
    again.resume("last")
    assert [path.stem for path in again.checkpoints.steps()] == ["step-0000000003"]
    best = load_checkpoint(ended.checkpoints.best)["model"]
    assert all(torch.equal(tensor, best[key]) for key, tensor in again.model.state_dict().items())


def test_nothing_is_deleted_before_the_way_back_is_saved(ended, make_trainer, monkeypatch):
    before = ended.checkpoints.steps()
    back = make_trainer(max_steps=8, **OFTEN)
    monkeypatch.setattr(back.checkpoints, "_write", lambda *_: 1 / 0)  # a full disk
    with pytest.raises(ZeroDivisionError):
        back.resume("best")
    assert ended.checkpoints.steps() == before


@pytest.mark.parametrize(("length", "losses", "best"), [(6, (1.0, 2.0), (5, 1.0)), (8, (3.5, 3.2, 3.3, 3.4), (6, 3.2))])
def test_a_best_checkpoint_of_an_abandoned_way_is_forgotten(make_trainer, length, losses, best):
    """With another length the rate is another: the best of step 5, after the checkpoint of step 4, is gone."""
    make_trainer(max_steps=6, scorer=scorer(6, 5, 4, 3, 1, 2), **OFTEN).fit(quiet())
    back = make_trainer(max_steps=length, scorer=scorer(*losses), **OFTEN)
    back.resume("previous")
    assert back.checkpoints.best.exists() == (length == 6)
    back.fit(quiet())
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == best
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == best[0]


def test_a_best_checkpoint_that_cannot_be_read_is_forgotten(ended, make_trainer):
    content = bytearray(ended.checkpoints.best.read_bytes())
    content[len(content) // 2] ^= 1
    ended.checkpoints.best.write_bytes(content)
    back = make_trainer(max_steps=8, scorer=scorer(5, 6, 7, 8), **OFTEN)
    back.resume("previous")
    console = quiet()
    back.fit(console)
    assert "note: the best checkpoint cannot be read and is removed: " in console.file.getvalue()
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == (5, 5.0)
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == 5


def test_a_best_checkpoint_between_evaluations_keeps_its_score(make_trainer):
    """The best of step 5 is later than the checkpoint of step 4, and the resumed run is not evaluated at step 5."""
    trainer = make_trainer(max_steps=8, scorer=scorer(6, 5, 4, 3, 1), **OFTEN)
    before_step(trainer, 6, cut)
    with pytest.raises(PowerCut):
        trainer.fit(quiet())
    # its summary is written with every checkpoint, between two of steps, too
    assert staleness(trainer.folder, {"checkpoint": "best", "step": 5}) == ""
    assert staleness(trainer.folder, {"checkpoint": "best", "step": 4})
    assert staleness(trainer.folder, {"checkpoint": "last", "step": 4}) == ""
    back = make_trainer(max_steps=8, scorer=scorer(2.0, 2.5), **(OFTEN | {"eval_every": 2}))
    back.resume("last")
    assert back.position.step == 4
    back.fit(quiet())
    assert (back.scores["best"]["step"], back.scores["best"]["loss"]) == (5, 1.0)
    assert load_checkpoint(back.checkpoints.best)["position"]["step"] == 5


def test_a_run_that_diverges_waits_for_the_checkpoint_that_is_being_written(make_trainer, monkeypatch):
    trainer, waited = make_trainer(max_steps=4, scorer=scorer(1.0, float("nan")), eval_every=1), []
    monkeypatch.setattr(trainer.checkpoints, "finish", lambda: waited.append(trainer.position.step))
    with pytest.raises(TrainingDiverged, match="step 2: the validation loss is nan"):
        trainer.fit(quiet())
    assert waited == [2]


@pytest.mark.parametrize(("losses", "there"), [((float("nan"),), []), ((1.0, float("nan")), ["best.safetensors"])])
def test_a_run_that_diverges_names_its_checkpoints_if_there_are_any(make_trainer, losses, there):
    trainer = make_trainer(max_steps=4, scorer=scorer(*losses), eval_every=1)
    with pytest.raises(TrainingDiverged) as error:
        trainer.fit(quiet())
    assert [path.name for path in trainer.checkpoints.path.glob("*")] == there
    named = f"; the checkpoints saved before this step are in {trainer.folder.checkpoints}"
    assert str(error.value).endswith(named) is bool(there)


# --- the folder while it trains: locked, and in place ---


def test_a_folder_that_goes_away_ends_the_run_and_stays_away(make_trainer, tmp_path):
    """Also before anything is due."""
    run = tmp_path / "run"
    often = make_trainer(eval_every=2, save_every=1, scorer=on_call(2, lambda: shutil.rmtree(run)))
    seldom = make_trainer(eval_every=100, save_every=100, log_every=100)
    before_step(seldom, 3, lambda: shutil.rmtree(run))
    for trainer, step in ((often, 4), (seldom, 3)):
        with pytest.raises(FileNotFoundError, match=r"run is .*run, which was removed, moved or replaced"):
            trainer.fit(quiet())
        assert trainer.position.step == step
        assert not run.exists()


def test_a_new_run_does_not_mix_with_the_one_in_its_folder(make_trainer):
    make_trainer(epochs=1).fit(quiet())
    other = make_trainer(epochs=1, optimizer={"learning_rate": 0.001})
    before = sorted(path.name for path in other.checkpoints.path.iterdir()), other.folder.metrics.read_text()
    with pytest.raises(FileExistsError, match=r"with step-0000000008\.safetensors; expected a .* after step 0"):
        other.fit(quiet())
    assert (sorted(path.name for path in other.checkpoints.path.iterdir()), other.folder.metrics.read_text()) == before
