"""The scores of runs: measured, written, read."""

import json
import shutil
from pathlib import Path

import pytest

from recurra.train.evaluate import evaluate
from recurra.train.run import _score_file, find_scores, open_run, score_run, write_scores
from recurra.train.run_folder import RunFolder
from recurra.train.task import find_task


def test_a_text_run_is_scored_with_its_lengths(there):
    run = open_run("runs/text", overrides=["--data.segment_length", "3"])
    scores = score_run(run, "valid")
    assert (scores["split"], scores["checkpoint"], scores["step"]) == ("valid", "best", run.step)
    assert (scores["changes"], scores["segment_length"]) == ({"data.segment_length": 3}, 3)
    assert scores["loss"] == evaluate(run.model, run.data.source("valid")).loss
    assert scores["n_targets"] == 3 * 7 - 1
    assert "mem_len" not in scores


def test_graphs_of_a_run_are_for_its_scores_too(there, monkeypatch):
    monkeypatch.setattr("recurra.train.task.capture_on", lambda device, graphs: (device.type, graphs))
    captures: list = []

    def spy(*given, capture, **options):
        captures.append(capture)
        return evaluate(*given, **options)

    monkeypatch.setattr("recurra.train.task.evaluate", spy)
    score_run(open_run("runs/text", overrides=["--training.graphs", "auto"]))
    assert captures == [("cpu", "auto")]


def test_a_memory_horizon_run_is_scored_by_span_as_well(there):
    run = open_run("runs/horizon")
    scores = score_run(run)
    assert "segment_length" not in scores
    overall, spans = run.task.score_by_span(run)
    assert overall.accuracy == pytest.approx(scores["accuracy"])
    parts = sorted(scores[f"accuracy_{when}_resets"] for when in ("before", "after"))
    assert parts[0] <= scores["accuracy"] <= parts[1]
    assert int(spans.n_correct.sum()) / int(spans.counts.sum()) == pytest.approx(overall.accuracy)
    with pytest.raises(ValueError, match="runs/text, a run of text; expected one on Memory Horizon"):
        find_task("text").score_by_span(open_run("runs/text"))


def test_a_video_run_is_scored_by_class(there):
    run = open_run("runs/video")
    scores = score_run(run)
    assert sum(map(sum, scores["confusion"])) == scores["n_videos"] == len(run.data.videos("test"))
    assert list(scores["class_accuracies"]) == list(run.class_names)
    assert scores["top_1"] == sum(scores["confusion"][i][i] for i in range(4)) / scores["n_videos"]


def test_scores_are_written_by_split_and_changes_and_read_again(there, tmp_path):
    copy = Path(shutil.copytree("runs/text", tmp_path / "copy"))
    for overrides in ([], ["--data.segment_length", "3"]):
        run = open_run(copy, overrides=overrides)
        path = write_scores(run.folder, score_run(run))
        assert path == _score_file(run.folder, "test", run.changes)
    assert {path.name for path in copy.glob("eval*")} == {"eval-test.json", "eval-test-segment_length-3.json"}
    scores = open_run(copy).scores
    assert scores.keys() == {"test", "test-segment_length-3"}
    assert scores["test"] == json.loads(json.dumps(score_run(open_run(copy)))) | {
        key: scores["test"][key] for key in ("seconds", "tokens_per_second") if key in scores["test"]
    }


def test_scores_that_are_missing_say_the_command_that_measures_them(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    with pytest.raises(ValueError, match=r"recurra eval '.*/my run' --model\.mem_len null --data\.path 'a b'$"):
        find_scores(folder, "test", {"model.mem_len": None, "data.path": "a b"})
