import errno
import io
import sys

import pytest
from rich.console import Console

from recurra.train.metrics import RunProgress

RECORD = {
    "step": 50,
    "epoch": 2,
    "tokens": 5000,
    "seconds": 10.0,
    "train_loss": 1.23456,
    "tokens_per_second": 12345.6,
    "valid_loss": 2.5,
    "valid_accuracy": 0.25,
}


def test_without_a_terminal_there_are_plain_lines():
    out = io.StringIO()
    progress = RunProgress(200, 0, Console(file=out, width=40))
    progress.advance(50)
    progress.report(RECORD)
    progress.report(
        {key: RECORD[key] for key in ("step", "epoch", "tokens", "seconds", "valid_loss", "valid_accuracy")}
    )
    progress.note("see [this]")
    progress.close()
    assert out.getvalue().splitlines() == [
        "epoch 2  step 50/200  loss 1.2346  12,346 tokens/s  validation: loss 2.5000  accuracy 0.2500  0:00:30 left",
        "epoch 2  step 50/200  validation: loss 2.5000  accuracy 0.2500  0:00:30 left",
        "see [this]",
    ]


def test_on_a_terminal_there_is_a_bar_with_the_evaluations_above_it():
    out = io.StringIO()
    progress = RunProgress(200, 40, Console(file=out, force_terminal=True, width=120, color_system=None))
    progress.advance(50)
    progress.report(RECORD)
    progress.close()
    text = out.getvalue()
    assert "validation: loss 2.5000" in text
    for part in ("epoch 2", "50/200", "loss 1.2346", "12,346 tokens/s"):
        assert part in text


class Failing(io.StringIO):
    """A file that cannot be written to any more."""

    def __init__(self, number: int, terminal: bool) -> None:
        super().__init__()
        self.number, self.terminal = number, terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        raise OSError(self.number, "no more")


@pytest.fixture
def own_stdout(tmp_path, monkeypatch):
    """A standard output that rich may replace."""
    with (tmp_path / "stdout").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_terminal_or_pipe_shows_nothing_more_and_fails_nothing(terminal, number, own_stdout):
    progress = RunProgress(200, 40, Console(file=io.StringIO(), force_terminal=terminal, width=120))
    progress._console.file = Failing(number, terminal)
    progress.note("a line")
    progress.advance(50)
    progress.report(RECORD)
    progress.close()


def test_a_full_disk_under_the_output_is_not_passed_over():
    progress = RunProgress(200, 40, Console(file=Failing(errno.ENOSPC, False), width=120))
    with pytest.raises(OSError, match="no more"):
        progress.note("a line")
