"""The folder of a run while it trains: locked, and in place."""

import io
import shutil

import pytest
from rich.console import Console

from recurra.train.evaluate import evaluate


def quiet() -> Console:
    return Console(file=io.StringIO())


class Interfere:
    """An evaluation during which something happens outside, when it is called for the n-th time."""

    def __init__(self, calls, happens):
        self.calls, self.happens = calls, happens

    def __call__(self, model, source):
        self.calls -= 1
        if self.calls == 0:
            self.happens()
        return evaluate(model, source)


def test_a_folder_that_goes_away_ends_the_run_and_stays_away(make_trainer, tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(eval_every=2, save_every=1, scorer=Interfere(2, lambda: shutil.rmtree(run)))
    with pytest.raises(FileNotFoundError, match=r"run is .*run, which was removed, moved or replaced"):
        trainer.fit(quiet())
    assert not run.exists()


def test_a_folder_that_goes_away_is_noticed_before_anything_is_due(make_trainer, tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(eval_every=100, save_every=100, log_every=100)
    update = trainer._update

    def remove_in_step_3():
        if trainer.position.step == 2:
            shutil.rmtree(run)
        return update()

    trainer._update = remove_in_step_3
    with pytest.raises(FileNotFoundError, match="removed, moved or replaced"):
        trainer.fit(quiet())
    assert trainer.position.step == 3
    assert not run.exists()


def test_a_run_is_locked_while_it_trains_and_only_then(make_trainer):
    refused = []

    def train_too():
        with pytest.raises(BlockingIOError, match="which process"):
            make_trainer().fit(quiet())
        refused.append(True)

    make_trainer(scorer=Interfere(1, train_too)).fit(quiet())
    assert refused == [True]
    again = make_trainer()
    again.resume("last")
    again.fit(quiet())


def test_a_new_run_does_not_mix_with_the_one_in_its_folder(make_trainer):
    make_trainer(epochs=1).fit(quiet())
    other = make_trainer(epochs=1, optimizer={"learning_rate": 0.001})
    before = sorted(path.name for path in other.checkpoints.path.iterdir()), other.folder.metrics.read_text()
    with pytest.raises(FileExistsError, match=r"with step-0000000008\.safetensors; expected a .* after step 0"):
        other.fit(quiet())
    assert (sorted(path.name for path in other.checkpoints.path.iterdir()), other.folder.metrics.read_text()) == before
