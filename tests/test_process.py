"""The signals that stop a run."""

import os
import signal
import threading

import pytest

from recurra._process import StopSignal

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
