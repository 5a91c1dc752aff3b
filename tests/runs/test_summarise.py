"""From a run's folder to its summary."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.killed_runs import Ending, train_until
from tests.scored_runs import HORIZON

from recurra.cli import main
from recurra.runs.summarise import summarise
from recurra.training import CheckpointError, load_recipe, read_metrics

RECIPES = Path("recipes")


@pytest.fixture
def there(monkeypatch, scored) -> Path:
    """The folder of the recipes and runs, as the working folder."""
    monkeypatch.chdir(scored)
    return scored


def log(run: str) -> list[dict[str, Any]]:
    return read_metrics(Path(run) / "log.jsonl")


def test_a_run_on_memory_horizon(there):
    summary = summarise("runs/horizon", RECIPES)
    assert summary.name == "horizon"
    assert summary.command == (
        "recurra train recipes/toy/horizon.yaml --optimizer.learning_rate 0.01 --run runs/horizon"
    )
    assert (summary.finished, summary.steps, summary.total_steps, summary.epochs) == (True, 12, 12, 3.0)
    assert (summary.unit, summary.count, summary.resumed_at) == ("tokens", 3 * 32 * 24, [])
    written = json.loads(Path("runs/horizon/summary.json").read_text())
    assert summary.parameters == written["parameters"]
    assert summary.seconds == pytest.approx(written["seconds"], rel=0.2)
    assert summary.versions == written["versions"]
    assert summary.hardware == written["hardware"]
    assert summary.validation.keys() == {"best", "last"}
    for which, score in summary.validation.items():
        own = {key: value for key, value in written["validation"][which].items() if key != "since_best"}
        assert score == pytest.approx(own, rel=1e-5)
    scores = json.loads(Path("runs/horizon/eval-test.json").read_text())
    assert summary.score("accuracy") == pytest.approx(scores["accuracy"], rel=1e-5)
    rows = log("runs/horizon")
    assert summary.curve["step"] == [int(row["step"]) for row in rows]
    assert summary.curve["train_loss"] == pytest.approx([float(row["train_loss"]) for row in rows], rel=1e-5)
    measured = [(row["step"], row["valid_loss"]) for row in rows if row["valid_loss"]]
    kept = [pair for pair in zip(summary.curve["step"], summary.curve["valid_loss"]) if pair[1] is not None]
    assert [step for step, _ in kept] == [int(step) for step, _ in measured] == [4, 8, 12]


def test_spans_and_gates_are_those_of_the_test_split(there):
    summary = summarise("runs/horizon", RECIPES)
    scores = json.loads(Path("runs/horizon/eval-test.json").read_text())
    assert sum(summary.spans["counts"]) == 4 * 24
    assert sum(summary.spans["n_correct"]) / (4 * 24) == pytest.approx(scores["accuracy"])
    data = load_recipe("runs/horizon/config.yaml").build_data()
    tokens = data.source("test").batch(0, 0).inputs[0].tolist()
    assert summary.gates["resets"] == [step for step, token in enumerate(tokens) if token == data.reset_token]
    assert len(summary.gates["resets"]) == 2
    assert summary.gates["layers"] == [0, 1]
    assert [len(means) for means in summary.gates["means"]] == [24, 24]
    assert all(0 < mean < 1 and mean == round(mean, 3) for means in summary.gates["means"] for mean in means)


def test_gates_that_do_not_change_are_omitted(there, tmp_path):
    assert main(["train", "recipes/toy/fixed.yaml", "--run", str(tmp_path / "fixed"), "--training.max_steps", "1"]) == 0
    summary = summarise(tmp_path / "fixed", RECIPES)
    assert summary.gates is None
    assert summary.spans is not None
    assert summary.command.startswith("recurra train recipes/toy/fixed.yaml --training.max_steps 1 ")
    assert (summary.finished, summary.epochs, summary.scores) == (True, 0.25, {})


def test_a_run_over_text_has_its_cost_and_not_its_places(there, tmp_path):
    summary = summarise("runs/toy-crt", RECIPES)
    assert summary.command == "recurra train recipes/toy/family.yaml#crt --data.path FOLDER"
    assert summary.config["data"]["path"] == "corpus"
    assert (summary.spans, summary.gates) == (None, None)
    assert summary.scores.keys() == {"eval-test", "eval-test-segment_length-2"}
    assert main(["cost", "runs/toy-crt", "--json", str(tmp_path / "cost.json")]) == 0
    (row,) = json.loads((tmp_path / "cost.json").read_text())
    assert summary.cost["measured"] == row["measured"]
    assert summary.cost["segment_length"] == 4


def test_a_finished_run_over_text_needs_no_weights(there, tmp_path):
    expected = summarise("runs/toy-crt", RECIPES)
    copy = shutil.copytree("runs/toy-crt", tmp_path / "toy-crt")
    shutil.rmtree(copy / "checkpoints")
    found = summarise(copy, RECIPES)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.2)
    assert replace(found, command="", seconds=0.0) == replace(expected, command="", seconds=0.0)
    told = json.loads((copy / "summary.json").read_text()) | {"finished": False}
    (copy / "summary.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="which does not exist"):
        summarise(copy, RECIPES)


def test_a_run_killed_and_resumed_has_the_curve_of_one_that_was_not(there, tmp_path):
    """kill -9 in the middle; its summary says so before and after it continues."""
    longer = ["--training.epochs", "6", "--training.save_every", "7"]
    assert main(["train", "recipes/toy/horizon.yaml", "--run", str(tmp_path / "whole"), *longer]) == 0
    cut = Ending(signal.SIGKILL, 18, ["recipes/toy/horizon.yaml", "--run", str(tmp_path / "cut"), *longer])
    ended = train_until(there, cut)
    assert ended.status == -signal.SIGKILL, ended.said

    before = summarise(tmp_path / "cut", RECIPES)
    assert (before.finished, before.total_steps, before.resumed_at) == (False, 24, [])
    assert before.steps == 18
    assert before.epochs == pytest.approx(18 / 4)
    assert before.hardware["threads"] == 1
    assert before.count == before.steps * 8 * 24
    assert len(before.curve["step"]) == before.steps
    measured = [row for row in before.rows() if "valid_accuracy" in row]
    best = max(measured, key=lambda row: (row["valid_accuracy"], -row["valid_loss"]))
    assert before.validation["best"]["step"] == best["step"]

    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    after, whole = (summarise(tmp_path / name, RECIPES) for name in ("cut", "whole"))
    assert after.finished
    assert after.resumed_at == [14]
    assert (after.curve, after.validation) == (whole.curve, whole.validation)
    assert (after.spans, after.gates, whole.resumed_at) == (whole.spans, whole.gates, [])


def test_a_run_that_patience_ends_is_finished(there, tmp_path):
    words = ["--training.epochs", "6", "--training.patience", "1", "--training.eval_every", "1"]
    words += ["--optimizer.learning_rate", "1e-30", "--training.max_steps", "9"]
    assert main(["train", "recipes/toy/horizon.yaml", "--run", str(tmp_path / "run"), *words]) == 0
    found = summarise(tmp_path / "run", RECIPES)
    assert found.finished
    assert found.steps < found.total_steps == 9


def test_a_run_that_is_good_enough_is_finished(there, tmp_path):
    words = ["--training.max_steps", "9", "--training.eval_every", "1", "--training.stop_at", "1000.0"]
    monitor = ["--training.monitor", "loss"]
    assert main(["train", "recipes/toy/horizon.yaml", "--run", str(tmp_path / "run"), *words, *monitor]) == 0
    found = summarise(tmp_path / "run", RECIPES)
    assert found.finished
    assert (found.steps, found.total_steps) == (1, 9)


# --- mistakes ---


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        summarise(tmp_path, RECIPES)


def test_values_that_would_change_the_run_are_refused(there):
    with pytest.raises(ValueError, match=r"overrides is a change of data.segment_length; expected paths alone"):
        summarise("runs/toy-crt", RECIPES, ["--data.segment_length", "3"])


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(HORIZON)
    with pytest.raises(CheckpointError, match="which does not exist"):
        summarise(tmp_path, RECIPES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"checkpoint": "best", "step": 3, "accuracy": 0.5}',
            "of step 3; expected those of the best",
        ),
        ('{"checkpoint": "last", "step": 1, "accuracy": 0.5}', "was scored at step 1; its last checkpoint is now of"),
        ("{", "not readable as JSON"),
        ("[1]", "a list; expected a JSON object"),
        ('{"checkpoint": "best", "step": "3"}', "step is a str; expected a whole number"),
        ("{}", "which has no checkpoint or no step"),
    ],
)
def test_scores_of_another_checkpoint_or_broken_ones_are_refused(there, content, message):
    file = Path("runs/horizon/eval-test-odd.json")
    file.write_text(content)
    try:
        with pytest.raises(ValueError, match=message) as raised:
            summarise("runs/horizon", RECIPES)
    finally:
        file.unlink()
    assert str(file) in str(raised.value)
