"""The process of a run."""

import pytest

from recurra.train._process import set_up_process
from recurra.train.config import TrainingConfig


@pytest.mark.parametrize("count", ["1", "", "several"])
def test_the_only_process_of_a_launcher_may_train(monkeypatch, count):
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.setenv("RANK", "0")
    assert set_up_process(TrainingConfig(accelerator="cpu")).world_size == 1
