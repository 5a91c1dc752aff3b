import os
import signal
import threading

import pytest

from recurra.training.signals import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = [signal.getsignal(each) for each in StopSignal.SIGNALS]
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
    assert [signal.getsignal(each) for each in StopSignal.SIGNALS] == before


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests are a shell's background job: those inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
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
