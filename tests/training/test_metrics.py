import math
from contextlib import suppress

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurra.training import read_metrics
from recurra.training.csv_log import CHECK, COLUMNS, CsvLog
from recurra.training.metrics import RunningSums, TensorBoardLog


def write(path, steps, *, last_step=0, loss=0.5):
    log = CsvLog(path, last_step=last_step)
    for step in steps:
        log.write({"step": step, "epoch": 1, "train_loss": loss + step})
    log.close()


def test_numbers_come_back_to_the_last_bit(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    log.write({"step": 3, "train_loss": 1 / 3, "learning_rate": 5e-324})
    (row,) = read_metrics(path)  # before the file is closed: a killed process leaves what it wrote
    log.close()
    assert tuple(row) == COLUMNS
    assert (float(row["train_loss"]), float(row["learning_rate"])) == (1 / 3, 5e-324)
    assert row["valid_loss"] == ""


def test_records_after_the_resumed_step_are_dropped_and_written_anew(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, range(1, 8))
    write(path, range(5, 10), last_step=4)
    assert [int(row["step"]) for row in read_metrics(path)] == list(range(1, 10))
    write(path, [1])
    assert [int(row["step"]) for row in read_metrics(path)] == [1]


@pytest.mark.parametrize("torn", ["5,1,0.1", "5", "5,1,0.123456,,,,,,,"])
def test_a_line_that_a_killed_process_left_unfinished_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.csv"
    write(path, range(1, 5))
    with path.open("a") as file:
        file.write(torn)
    assert [int(row["step"]) for row in read_metrics(path)] == [1, 2, 3, 4]
    write(path, [5], last_step=4)
    assert [float(row["train_loss"]) for row in read_metrics(path)] == [1.5, 2.5, 3.5, 4.5, 5.5]


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:2] + lines[3:], ":3 is a damaged line"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], ":4 is a damaged line"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], ":3 is a damaged line"),
        (lambda lines: [*lines[:3], lines[3].replace("3.5", "3.6"), *lines[4:]], ":4 is a damaged line"),
        (lambda lines: lines[1:], "the header of .* is '1,1,1.5"),
        (lambda lines: [], "the header of .* is ''; expected step,epoch"),
        (lambda lines: [lines[0].replace("epoch", "epodh"), *lines[1:]], "the header of .* is 'step,epodh"),
    ],
)
def test_a_damaged_log_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "metrics.csv"
    write(path, range(1, 5))
    path.write_text("".join(change(lines_of(path))))
    for read in (read_metrics, CsvLog):
        with pytest.raises(ValueError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_a_log_that_ends_early_is_what_a_killed_process_leaves(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, range(1, 5))
    path.write_text("".join(lines_of(path)[:3]))
    assert [int(row["step"]) for row in read_metrics(path)] == [1, 2]


def test_checks_continue_when_a_run_resumes(tmp_path):
    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    write(whole, range(1, 10))
    write(cut, range(1, 8))
    write(cut, range(5, 10), last_step=4)
    assert cut.read_text() == whole.read_text()
    header, *lines = (line.strip().split(",") for line in lines_of(cut))
    assert header[-1] == CHECK
    assert all(line[-1].isdecimal() for line in lines)


def test_an_older_log_has_no_checks_and_is_read_with_a_note(tmp_path, caplog):
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss,valid_loss\n1,0.5,\n2,0.25,1e-05\n3,0.1")
    rows = read_metrics(path)
    assert f"{path} has no digest" in caplog.text
    assert [row["step"] for row in rows] == ["1", "2"]
    assert [(row["train_loss"], row["valid_loss"], row["frames"]) for row in rows] == [
        ("0.5", "", ""),
        ("0.25", "1e-05", ""),
    ]
    write(path, [3], last_step=2)
    caplog.clear()
    assert [float(row["train_loss"]) for row in read_metrics(path)] == [0.5, 0.25, 3.5]
    assert not caplog.text  # now it has checks


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1.5,1,1", ":2: step is '1.5'; expected a whole number"),
        (",1,1", ":2: step is ''; expected a whole number"),
        ("9999999999999999999,1,1", "step is"),
        ("1,one,1", ":2: train_loss is 'one'; expected a number or nothing"),
        ("1,1e999,1", "train_loss is '1e999'"),
        ("1,1,-3", ":2: tokens is '-3'; expected a whole number"),
        ("1,1", ":2 is a line of 2 cells; expected 3 as in its header"),
        ("", ":2 is a line of 1 cells"),
    ],
)
def test_cells_of_an_older_log_are_checked(tmp_path, line, message):
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,train_loss,tokens\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_an_unknown_column_is_refused(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match="trian_loss"):
        log.write({"step": 1, "trian_loss": 0.0})
    log.close()


def test_tensorboard_sees_one_value_a_step_after_a_resume(tmp_path):
    for steps, last_step in ((range(1, 8), 0), (range(5, 10), 4)):
        log = TensorBoardLog(tmp_path, last_step=last_step)
        for step in steps:
            log.write({"step": step, "train_loss": step + last_step / 10})
        log.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train_loss")
    assert [event.step for event in events] == list(range(1, 10))
    assert events[-1].value == pytest.approx(9.4)


def test_a_window_weighs_every_target_the_same_and_can_be_put_away():
    window = RunningSums("cpu")
    assert math.isnan(window.mean_loss())
    window.add(torch.tensor(6.0, requires_grad=True), 2, 4)
    window.add(torch.tensor(1.0), 5, 6)
    restored = RunningSums("cpu")
    restored.load_state_dict(window.state_dict())
    assert restored.mean_loss() == window.mean_loss() == 1.0
    assert restored.n_tokens == 10
    assert not window.loss.requires_grad


def test_a_window_sums_in_float64():
    window = RunningSums("cpu")
    for _ in range(1000):
        window.add(torch.tensor(1e6), 1, 1)
        window.add(torch.tensor(0.01), 0, 0)
    assert window.mean_loss() == pytest.approx(1e6 + 0.01, rel=1e-12)


@pytest.mark.parametrize("log", [lambda path: CsvLog(path / "metrics.csv"), TensorBoardLog], ids=["csv", "tensorboard"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, file_size_limit, log):
    log = log(tmp_path)
    (file,) = tmp_path.iterdir()
    file_size_limit(file.stat().st_size + 10)
    with pytest.raises(OSError, match="File too large") as caught:
        log.write({"step": 1, "train_loss": 0.123456789})
    assert caught.value.filename == str(file)
    with suppress(OSError):
        log.close()
