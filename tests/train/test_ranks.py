"""The ranks of a run: their launcher, their random numbers, the pieces that they share."""

import os
import random

import numpy as np
import pytest
import torch
from tests.train.payloads import payload

from recurra.train._ranks import Ranks, set_up_process
from recurra.train._resumable import _random_state, _set_random_state
from recurra.train.checkpoint import _save_checkpoint, load_checkpoint
from recurra.train.config import TrainingConfig


def draw() -> list[float]:
    return [
        *(random.random() for _ in range(3)),
        random.gauss(0, 1),
        *np.random.random(3),  # noqa: NPY002
        np.random.standard_normal(),  # noqa: NPY002
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
    ]


def test_pieces_divide_the_ranks():
    with pytest.raises(ValueError, match=r"sequence_parallel is 3; expected a number that divides the 4 ranks"):
        Ranks(0, 4, n_pieces=3)


def test_the_same_numbers_come_again_after_a_trip_through_a_file(tmp_path):
    draw()  # leaves half a pair of normal numbers waiting, in Python's and in NumPy's generator
    _save_checkpoint(tmp_path / "state.safetensors", payload(random=_random_state()))
    expected = draw()
    assert draw() != expected
    _set_random_state(load_checkpoint(tmp_path / "state.safetensors")["random"])
    assert draw() == expected


@pytest.mark.parametrize("count", ["1", "several"])
def test_the_only_process_of_a_launcher_may_train(monkeypatch, count):
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.setenv("RANK", "0")
    assert set_up_process(TrainingConfig(accelerator="cpu")).world_size == 1


def test_a_deterministic_run_sets_up_its_process(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("RANK", "0")
    try:
        assert set_up_process(TrainingConfig(accelerator="cpu", deterministic=True)).world_size == 1
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
