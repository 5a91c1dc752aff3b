"""The figures of runs."""

import shutil
from pathlib import Path

import pytest

from recurra.train._figures import _curves, draw_runs, gates_of, shared_folder
from recurra.train.checkpoint import CheckpointError
from recurra.train.run import open_run


@pytest.fixture
def copies(there, tmp_path) -> dict[str, Path]:
    """Copies of the runs, without figures."""
    return {name: Path(shutil.copytree(f"runs/{name}", tmp_path / name)) for name in ("text", "horizon", "video")}


def figures(copies: dict[str, Path]) -> list[Path]:
    return sorted(file for copy in copies.values() for file in copy.glob("figures/*"))


def test_each_run_has_its_gates_and_all_share_curves_and_spans(copies, tmp_path):
    runs = [open_run(copies["horizon"]), open_run(copies["text"])]
    assert [len(gates_of(run).tokens) for run in runs] == [1, 1]
    files = draw_runs(runs)
    own, shared = {"gate-magnitudes", "gate-phases"}, {"curves", "magnitude-activations", "accuracy-by-span"}
    kinds = ("png", "svg")
    expected = {copies[run.name] / "figures" / f"{name}.{kind}" for run in runs for name in own for kind in kinds}
    assert set(files) == expected | {tmp_path / "figures" / f"{name}.{kind}" for name in shared for kind in kinds}
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.usefixtures("unrendered_figures")
def test_curves_need_neither_corpus_nor_videos_and_go_to_the_runs_folder_unless_another_is_given(copies):
    (copies["video"] / "eval-test.json").write_text(
        '{"confusion": [[1, 0], [0, 1]], "class_accuracies": {"a": 1, "b": 1}}'
    )
    run = open_run(copies["video"], overrides=["--data.path", "nowhere"])
    files = draw_runs([run])
    assert {file.stem for file in files} == {"confusion-test", "curves"}
    assert {file.parent for file in files} == {copies["video"] / "figures"}
    assert gates_of(run) is None
    (rows,) = _curves([open_run(copies["text"], overrides=["--data.path", "nowhere"])]).values()
    assert float(rows[-1]["valid_perplexity"]) > 1


def test_scores_of_another_checkpoint_are_not_drawn(copies):
    scores = '"confusion": [[1, 0], [0, 1]], "class_accuracies": {"a": 1, "b": 1}'
    file = copies["video"] / "eval-test.json"
    file.write_text(f'{{{scores}, "checkpoint": "last", "step": 2}}')
    with pytest.raises(ValueError, match=r"scored with the checkpoint last; expected scores of its best checkpoint"):
        draw_runs([open_run(copies["video"])])
    file.write_text(f'{{{scores}, "checkpoint": "best", "step": 999}}')
    with pytest.raises(ValueError, match=r"is scored at step 999; its best checkpoint is now of step"):
        draw_runs([open_run(copies["video"])])


def test_nothing_is_drawn_if_one_of_the_runs_cannot_be_read(copies):
    shutil.rmtree(copies["text"] / "checkpoints")
    with pytest.raises(CheckpointError):
        draw_runs([open_run(copies["horizon"]), open_run(copies["text"])])
    assert figures(copies) == []


def test_runs_of_one_name_are_refused(copies):
    runs = [open_run(copies["text"]), open_run(copies["text"])]
    with pytest.raises(ValueError, match="runs is several with the names text, text; expected folders with different"):
        draw_runs(runs)
    assert figures(copies) == []


def test_a_run_with_no_record_yet_has_no_curves(copies):
    (copies["text"] / "log.jsonl").write_text("")
    assert _curves([open_run(copies["text"])]) == {}


def test_the_folder_beside_a_run_is_found_from_within_it(copies, monkeypatch):
    monkeypatch.chdir(copies["horizon"])
    runs = [open_run("."), open_run(copies["text"])]
    assert shared_folder(runs) == Path(copies["horizon"]).resolve().parent / "figures"
