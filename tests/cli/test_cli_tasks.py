"""Runs on generated tasks: trained, and scored in pieces and as a whole."""

import pytest

from recurra.cli import main
from recurra.train.run import open_run

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
"""


@pytest.fixture
def family(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "tasks").mkdir(parents=True)
    (tmp_path / "recipes" / "tasks" / "family.yaml").write_text(FAMILY)
    return "recipes/tasks/family.yaml"


def test_the_scores_of_a_task_have_the_accuracy_above_chance(family):
    assert main(["train", f"{family}#parity"]) == 0
    assert main(["eval", "runs/tasks-parity"]) == 0
    scores = open_run("runs/tasks-parity").scores["test"]
    assert scores["scaled_accuracy"] == pytest.approx(2 * scores["accuracy"] - 1)


def test_pieces_of_long_sequences_score_as_the_whole(family):
    assert main(["train", f"{family}#induction"]) == 0
    run = "runs/tasks-induction"
    assert main(["eval", run]) == main(["eval", run, "--data.eval_piece", "7"]) == 0
    scores = open_run(run).scores
    whole, pieces = scores["test"], scores["test-eval_piece-7"]
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert (pieces["accuracy"], pieces["n_targets"]) == (whole["accuracy"], whole["n_targets"])
