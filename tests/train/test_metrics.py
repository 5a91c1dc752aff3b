import errno
import io
import math
import sys
import time
from contextlib import suppress

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurra.train._ranks import Ranks
from recurra.train.metrics import _COLUMNS, JsonLog, RunningSums, RunProgress, TensorBoardLog, read_metrics


def write(path, steps, *, last_step=0, loss=0.5):
    log = JsonLog(path, last_step=last_step)
    for step in steps:
        log.write({"step": step, "epoch": 1, "train_loss": loss + step})
    log.close()


def test_numbers_come_back_to_the_last_bit(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    log.write({"step": 3, "train_loss": 1 / 3, "learning_rate": 5e-324})
    (row,) = read_metrics(path)  # before the file is closed: a killed process leaves what it wrote
    log.close()
    assert tuple(row) == tuple(_COLUMNS)
    assert (float(row["train_loss"]), float(row["learning_rate"])) == (1 / 3, 5e-324)
    assert row["valid_loss"] is None


def test_a_record_of_another_name_is_refused(tmp_path):
    log = JsonLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="record is 'trian_loss'; expected keys among step, "):
        log.write({"step": 3, "trian_loss": 1.0})
    log.close()


def test_records_after_the_resumed_step_are_dropped_and_written_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), last_step=4)
    assert [int(row["step"]) for row in read_metrics(path)] == list(range(1, 10))
    write(path, [1])
    assert [int(row["step"]) for row in read_metrics(path)] == [1]


@pytest.mark.parametrize("torn", ["{", '{"step": 5, "train_loss": 0.5}'])
def test_a_line_that_a_killed_process_left_unfinished_is_dropped(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 5))
    with path.open("a") as file:
        file.write(torn)
    assert [int(row["step"]) for row in read_metrics(path)] == [1, 2, 3, 4]
    write(path, [5], last_step=4)
    assert [float(row["train_loss"]) for row in read_metrics(path)] == [1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 3', ":3 is not readable as JSON"),
        ('{"train_loss": 1.0}', ":3 is a record of train_loss; expected step, and keys among step, "),
        ('{"step": 3, "trian_loss": 1.0}', ":3 is a record of step, trian_loss"),
    ],
)
def test_a_damaged_log_is_refused_by_name(tmp_path, line, message):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 5))
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in [*lines[:2], line, *lines[3:]]))
    for read in (read_metrics, JsonLog):
        with pytest.raises(ValueError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("jump", [1, -3600, 365 * 86400])
def test_tensorboard_sees_one_value_a_step_after_a_resume(tmp_path, monkeypatch, jump):
    """Also if the clock was set to another time."""
    now = time.time_ns()
    for steps, last_step in ((range(1, 8), 0), (range(5, 10), 4)):
        monkeypatch.setattr(time, "time_ns", lambda offset=jump if last_step else 0: now + offset * 10**9)
        log = TensorBoardLog(tmp_path, last_step=last_step)
        for step in steps:
            log.write({"step": step, "train_loss": step + last_step / 10})
        log.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train_loss")
    assert [event.step for event in events] == list(range(1, 10))
    assert all(event.wall_time > 0 for event in events)  # with which TensorBoard shows the time a run took
    assert events[-1].value == pytest.approx(9.4)


def test_a_window_weighs_every_target_the_same_and_can_be_put_away():
    window = RunningSums("cpu")
    assert math.isnan(window.mean_loss())
    window.add(torch.tensor(6.0, requires_grad=True), 2, 4)
    window.add(torch.tensor(1.0), 5, 6)
    restored = RunningSums("cpu")
    restored.load_state_dict(window.state_dict(Ranks()))
    assert restored.mean_loss() == window.mean_loss() == 1.0
    assert restored.n_tokens == 10
    assert not window.loss.requires_grad


@pytest.mark.parametrize("log", [lambda path: JsonLog(path / "log.jsonl"), TensorBoardLog], ids=["json", "tensorboard"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, file_size_limit, log):
    log = log(tmp_path)
    (file,) = tmp_path.iterdir()
    file_size_limit(file.stat().st_size + 10)
    with pytest.raises(OSError, match="File too large") as caught:
        log.write({"step": 1, "train_loss": 0.123456789})
    assert caught.value.filename == str(file)
    with suppress(OSError):
        log.close()


# --- the progress of a run ---

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


def test_the_time_left_follows_the_speed_since_the_last_record():
    out = io.StringIO()
    progress = RunProgress(200, 0, Console(file=out, width=40))
    for step, seconds in ((50, 1000.0), (60, 1010.0), (70, 1015.0)):
        progress.report({**RECORD, "step": step, "seconds": seconds})
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == [
        "0:50:00 left",
        "0:02:20 left",
        "0:01:05 left",
    ]


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


@pytest.mark.parametrize(("terminal", "number"), [(True, errno.EIO), (False, errno.EPIPE)])
def test_a_closed_terminal_or_pipe_shows_nothing_more_and_fails_nothing(terminal, number, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", (tmp_path / "stdout").open("w"))  # which rich replaces
    progress = RunProgress(200, 40, Console(file=io.StringIO(), force_terminal=terminal, width=120))
    progress._console.file = Failing(number, terminal)
    progress.note("a line")
    progress.advance(50)
    progress.report(RECORD)
    progress.close()
