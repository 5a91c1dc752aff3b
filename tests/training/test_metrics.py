import math
from contextlib import suppress

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurra.training import read_metrics
from recurra.training.metrics import COLUMNS, CsvLog, RunningSums, TensorBoardLog


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
