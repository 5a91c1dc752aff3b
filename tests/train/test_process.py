"""The process of a run: its launcher, its random numbers, the signals that stop it."""

import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from tests.train.payloads import payload

from recurra._process import StopSignal
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


ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals_of_a_terminal():
    """Ctrl-C raises and SIGHUP can be caught, also under nohup and in a shell's background job, which ignore them."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = [signal.getsignal(each) for each in ALL]
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
    assert [signal.getsignal(each) for each in ALL] == before


def test_the_second_signal_is_not_held_back():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_changed():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with StopSignal() as stop:
            seen.extend([stop.received, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, before]
