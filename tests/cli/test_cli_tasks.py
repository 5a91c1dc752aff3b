"""Runs on generated tasks: trained, scored in pieces and as a whole, and set beside what was published."""

from pathlib import Path

import pytest
from tests.cli.conftest import failure
from tests.printed_tables import printed_columns

from recurra.cli import main
from recurra.runs import open_run
from recurra.training import read_family

FAMILY = """
common:
  data: {min_length: 6, max_length: 6, eval_min_length: 20, eval_max_length: 20, steps_per_epoch: 2, eval_steps: 2,
         batch_size: 4, eval_batch_size: 8}
  model: {n_layer: 1, d_model: 8, d_channel_mixing: 8, mixer: gru}
  training: {epochs: 1, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1, monitor: accuracy}
axes:
  task:
    parity: {experiment: state-tracking}
    induction: {experiment: induction}
published:
  parity: {test_scaled_accuracy: 100.0}
"""


@pytest.fixture
def family(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "tasks").mkdir(parents=True)
    (tmp_path / "recipes" / "tasks" / "family.yaml").write_text(FAMILY)
    return "recipes/tasks/family.yaml"


def test_the_table_of_a_task_is_in_accuracy_above_chance(family, capsys):
    assert main(["train", f"{family}#parity"]) == 0
    assert main(["eval", "runs/tasks-parity"]) == 0
    scores = open_run("runs/tasks-parity").scores["test"]
    assert scores["scaled_accuracy"] == pytest.approx(2 * scores["accuracy"] - 1)
    capsys.readouterr()
    assert main(["table", family]) == 0
    table = capsys.readouterr().out
    assert "Test accuracy above chance, per cent" in table
    row = next(line for line in table.splitlines() if " parity " in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["", "100.0", f"{100 * scores['scaled_accuracy']:.1f}"]


def test_a_family_without_published_figures_shows_what_it_monitors(family, capsys):
    path = Path(family)
    path.write_text(path.read_text().partition("published:")[0])
    assert main(["table", family]) == 0
    assert "Test accuracy, per cent" in capsys.readouterr().out
    path.write_text(path.read_text().replace(", monitor: accuracy", ""))
    assert main(["table", family]) == 0
    assert "Test perplexity" in capsys.readouterr().out


def test_names_and_departures_are_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    departure = "data.path /a/folder/with/a/name/that/is/longer/than/any/column, not words"
    monkeypatch.setattr("recurra.cli.table._measured", lambda *_: (1.0, [departure]))
    monkeypatch.setattr("recurra.cli.table.departures", lambda *_: [])
    assert main(["table", "state-tracking/arithmetic"]) == 0
    recipes, *_, departing = printed_columns(capsys.readouterr().out)
    names = list(read_family("state-tracking/arithmetic").variants)
    assert recipes == "".join(("recipe", *names))
    assert departing.replace(" ", "").count(departure.replace(" ", "")) == len(names)


@pytest.mark.parametrize("value", ["9", "[nine]"])
def test_published_tables_that_are_no_list_of_numbers_are_refused(family, capsys, value):
    Path(family).write_text(FAMILY.replace("100.0}", f"100.0, tables: {value}}}"))
    assert "published.parity.tables is" in failure(capsys, "table", family)


def test_pieces_of_long_sequences_score_as_the_whole(family):
    assert main(["train", f"{family}#induction"]) == 0
    run = "runs/tasks-induction"
    assert main(["eval", run]) == main(["eval", run, "--data.eval_piece", "7"]) == 0
    scores = open_run(run).scores
    whole, pieces = scores["test"], scores["test-eval_piece-7"]
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert (pieces["accuracy"], pieces["n_targets"]) == (whole["accuracy"], whole["n_targets"])
