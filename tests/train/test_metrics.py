import math
from contextlib import suppress

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurra.train.metrics import _COLUMNS, JsonLog, RunningSums, TensorBoardLog, read_metrics


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


def test_records_after_the_resumed_step_are_dropped_and_written_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), last_step=4)
    assert [int(row["step"]) for row in read_metrics(path)] == list(range(1, 10))
    write(path, [1])
    assert [int(row["step"]) for row in read_metrics(path)] == [1]


@pytest.mark.parametrize("torn", ['{"step": 5, "train_loss": 0.1', "{", '{"step": 5, "train_loss": 0.5}'])
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
        ("", ":3 is not readable as JSON"),
        ('{"step": 3', ":3 is not readable as JSON"),
        ("[3]", ":3 is JSON, but a list"),
        ('{"train_loss": 1.0}', ":3 is a record of train_loss; expected step, and keys among step, epoch"),
        ('{"step": 3, "trian_loss": 1.0}', ":3 is a record of step, trian_loss"),
        ('{"step": 3.5}', ":3: step is a float; expected a whole number"),
        ('{"step": 3, "train_loss": "one"}', ":3: train_loss is a str; expected a number"),
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


def test_an_unknown_column_is_refused(tmp_path):
    log = JsonLog(tmp_path / "log.jsonl")
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
