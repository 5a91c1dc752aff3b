"""Training data whose levels wait until one is learned: when they end, and what a resumed run does."""

from itertools import groupby

import pytest
import torch
from tests.train.conftest import VOCABULARY, quiet

from recurra.data.batches import Batch
from recurra.train._ranks import Ranks
from recurra.train.evaluate import evaluate
from recurra.train.loop import Trainer
from recurra.train.losses import Levels
from recurra.train.metrics import read_metrics

N_LEVELS = 3


class Counting:
    """Four batches an epoch; at level n, the token n + 1 again and again."""

    batch_size, n_levels = 2, N_LEVELS

    def __init__(self, level_loss: float, level: int = 0) -> None:
        self.level_loss, self.level = level_loss, level

    def __len__(self) -> int:
        return 4

    def at_level(self, level: int) -> "Counting":
        return Counting(self.level_loss, level)

    def batch(self, epoch: int, step: int) -> Batch:
        tokens = torch.full((2, 3), self.level + 1)
        return Batch(tokens, tokens, continues=False)


def levels_after(losses: list[float], level_loss: float) -> list[int]:
    levels = Levels(Counting(level_loss), "cpu")
    for loss in losses:
        for share, n_targets in ((0.1, 10), (1.3, 30)):  # the mean over the epoch counts, by targets
            levels.add(torch.tensor(loss * share * n_targets), n_targets)
        levels.end_epoch(Ranks())
    return [levels.source.level, levels.record["level"]]


def test_a_level_ends_with_an_epoch_below_its_loss():
    assert levels_after([], 0.5) == [0, 0]
    assert levels_after([0.5, 0.6], 0.5) == [0, 0]
    assert levels_after([0.4], 0.5) == [1, 0]
    assert levels_after([0.4, 0.7, 0.3], 0.5) == [2, 1]
    assert levels_after([0.9, 0.2], 0.5) == [1, 0]  # the mean of both would be above
    assert levels_after([0.1] * 9, 0.5) == [N_LEVELS, N_LEVELS]
    assert levels_after([float("nan")], 0.5) == [0, 0]


class OneOfTwo(Ranks):
    """A rank beside another one, whose ten targets have a loss of 0.8."""

    def total(self, loss: float, n_targets: int, n_tokens: int) -> list[float]:
        return [loss + 8.0, n_targets + 10, n_tokens]


def test_the_mean_is_over_all_ranks():
    for loss, level in ((0.1, 1), (0.3, 0)):
        levels = Levels(Counting(0.5), "cpu")
        levels.add(torch.tensor(10 * loss), 10)
        levels.end_epoch(OneOfTwo(count=2))
        assert levels.source.level == level


class CountingData:
    vocab_size = output_size = VOCABULARY

    def source(self, split: str) -> Counting:
        return Counting(1.2)


@pytest.fixture
def make_levelled(make_trainer):
    """make_levelled(name): a run over 8 epochs of `Counting`, with its checkpoints and records"""

    def make(name: str) -> Trainer:
        like = make_trainer(
            name, epochs=8, save_every=3, keep_checkpoints=200, eval_every=200, optimizer={"learning_rate": 0.1}
        )
        return Trainer(like.experiment, like.folder, evaluate, open_data=lambda *_: CountingData())

    return make


def log(trainer: Trainer) -> list[tuple[float, int]]:
    return [(row["train_loss"], row["level"]) for row in read_metrics(trainer.folder.metrics)]


def test_a_run_goes_through_the_levels_and_repeats_them_when_resumed(make_levelled):
    whole = make_levelled("whole")
    whole.fit(quiet())
    reached = [(level, len([*records])) for level, records in groupby(level for _, level in log(whole))]
    assert [level for level, _ in reached] == [0, 1, 2, 3]
    (_, first), (_, second), *_ = reached
    assert first % 4 == second % 4 == 0  # every record of an epoch has the level of its batches
    steps = whole.checkpoints.steps()
    for step in (next(step for step in range(first + 1, first + second) if step % 3 == 0), 30):
        path = steps[step // 3 - 1]
        other = make_levelled(f"from {step}")
        other.resume(str(path))
        other.fit(quiet())
        assert log(other) == log(whole)[step:]
