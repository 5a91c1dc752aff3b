"""Where a run was interrupted and resumed is known ever after."""

import io
import json
import os
import signal

import pytest
from rich.console import Console

from recurra.train.evaluate import evaluate
from recurra.train.metrics import read_metrics


def quiet() -> Console:
    return Console(file=io.StringIO())


def summary(trainer) -> dict:
    return json.loads(trainer.folder.summary.read_text())


def losses(trainer) -> list[tuple[float, ...]]:
    rows = read_metrics(trainer.folder.metrics)
    return [(row["step"], row["epoch"], row["train_loss"], row["valid_loss"]) for row in rows]


class PowerCut(Exception):
    """What no one hears a process say."""


def ends_at(call: int, how):
    """An evaluation that ends the run when it is called for the n-th time."""
    calls = iter(range(1, 1000))

    def scorer(model, source):
        if next(calls) == call:
            how()
        return evaluate(model, source)

    return scorer


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def cut():
    raise PowerCut


SETTINGS = {"epochs": 1, "eval_every": 1, "save_every": 2}


def test_every_resumption_is_kept_and_the_curve_has_no_seam(make_trainer):
    whole = make_trainer("whole", **SETTINGS)
    whole.fit(quiet())
    assert summary(whole)["resumed_at"] == []

    first = make_trainer("parts", scorer=ends_at(3, terminate), **SETTINGS)
    first.fit(quiet())
    assert (summary(first)["finished"], summary(first)["steps"], summary(first)["resumed_at"]) == (False, 3, [])
    second = make_trainer("parts", scorer=ends_at(3, terminate), **SETTINGS)
    second.resume("last")
    second.fit(quiet())
    assert (summary(second)["steps"], summary(second)["resumed_at"]) == (6, [3])
    third = make_trainer("parts", **SETTINGS)
    third.resume("last")
    third.fit(quiet())
    assert (summary(third)["finished"], summary(third)["resumed_at"]) == (True, [3, 6])
    assert losses(third) == losses(whole)
    assert summary(third)["validation"] == summary(whole)["validation"]


def test_a_killed_run_has_the_summary_of_its_last_checkpoint(make_trainer):
    with pytest.raises(PowerCut):
        make_trainer(scorer=ends_at(6, cut), **SETTINGS).fit(quiet())
    again = make_trainer(scorer=ends_at(2, cut), **SETTINGS)
    found = summary(again)
    assert (found["finished"], found["steps"], found["resumed_at"]) == (False, 4, [])
    assert found["hardware"]["cores"]
    again.resume("last")
    with pytest.raises(PowerCut):
        again.fit(quiet())
    last = make_trainer(**SETTINGS)
    last.resume("last")
    last.fit(quiet())
    assert summary(last)["resumed_at"] == [4], "the second kill came before a checkpoint: it went on from the same one"


def test_epochs_of_another_length_go_on_with_their_next_batch_and_a_note(make_trainer):
    """More ranks may leave out the small last batch of an epoch; here the text has lost it."""
    trainer = make_trainer(
        scorer=ends_at(2, terminate), data={"n_tokens": 3 * 5 * 8 + 1}, **SETTINGS | {"epochs": 3, "eval_every": 7}
    )
    trainer.fit(quiet())
    assert (trainer.position.epoch, trainer.position.batch) == (1, 6)
    shorter = make_trainer(data={"n_tokens": 3 * 5 * 6 + 1}, **SETTINGS | {"epochs": 3})
    shorter.experiment.data.n_tokens = trainer.experiment.data.n_tokens  # what a resumed run is compared by
    shorter.resume("last")
    assert (shorter.position.epoch, shorter.position.batch) == (2, 0)
    console = quiet()
    shorter.fit(console)
    assert shorter.position.step == shorter.total_steps == 18
    assert "epochs have 6 updates here, another number before step 14" in " ".join(console.file.getvalue().split())
