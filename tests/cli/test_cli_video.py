"""The command line over videos: training, scores, plots, and classifying a stream, on a tiny generated task."""

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.cli.conftest import failure

from recurra.cli import main

RECIPE = """
experiment: motions-{model}
data: {{n_videos: 20, n_motions: 2, frames_per_motion: 3, image_size: 16, n_frames: 3, batch_size: 8, workers: 0}}
model: {{patch_size: 8, n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}}
training: {{max_steps: 2, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with videos, a run of TimeSformer and one of CR-ViT that starts from it."""
    folder = tmp_path_factory.mktemp("video")
    (folder / "motions").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for model, start in (("timesformer", []), ("crvit", ["--init_from", "runs/motions-timesformer"])):
            Path(f"motions/{model}.yaml").write_text(RECIPE.format(model=model))
            assert main(["train", f"motions/{model}.yaml", "--data.path", "videos", *start]) == 0
    return folder


class Scored(NamedTuple):
    """What `recurra eval` printed, and the sizes of the figures that it drew."""

    printed: str
    figures: dict[str, int]


@pytest.fixture(scope="module")
def scored(workplace) -> Scored:
    """Both runs are scored; gives what was printed and drawn for CR-ViT."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(workplace)
        assert main(["eval", "runs/motions-crvit"]) == 0
        printed = out.getvalue()
        figures = {path.name: path.stat().st_size for path in Path("runs/motions-crvit/figures").iterdir()}
        assert main(["eval", "runs/motions-timesformer"]) == 0
    return Scored(printed, figures)


@pytest.fixture(autouse=True)
def there(monkeypatch, workplace):
    monkeypatch.chdir(workplace)


def video(number: int) -> str:
    return f"videos/videos/{number:06d}.mp4"


def test_eval_prints_and_writes_the_scores_and_draws_the_confusion(scored):
    assert "mean class accuracy" in scored.printed
    assert "top 1" in scored.printed
    assert "top 5" not in scored.printed  # of 4 classes
    scores = json.loads(Path("runs/motions-crvit/eval-test.json").read_text())
    confusion = torch.tensor(scores["confusion"])
    assert (confusion.shape, int(confusion.sum())) == ((4, 4), 2)
    assert scores["top_1"] == int(confusion.diagonal().sum()) / 2
    assert (scores["views"], scores["crops"], scores["n_videos"], scores["n_videos_left_out"]) == (1, 1, 2, 0)
    seen = [name for name, accuracy in scores["class_accuracies"].items() if accuracy is not None]
    accuracies = [scores["class_accuracies"][name] for name in seen]
    assert scores["mean_class_accuracy"] == sum(accuracies) / len(accuracies)
    assert sorted([*seen, *scores["classes_without_videos"]]) == sorted(scores["class_accuracies"])
    for suffix in ("png", "svg"):
        assert scored.figures[f"confusion-test.{suffix}"] > 1000


@pytest.mark.usefixtures("unrendered_figures")  # `recurra eval` renders the confusion
def test_plot_draws_curves_and_confusion(capsys, scored):
    assert main(["plot", "runs/motions-timesformer", "runs/motions-crvit", "--out", "both"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names.count("confusion-test.png") == 2
    assert names.count("curves.png") == 1
    assert not any("magnitude" in name for name in names)


def test_classify_says_each_segment_and_draws_a_sheet(capsys, tmp_path):
    csv_file = tmp_path / "said.csv"
    words = ["classify", "runs/motions-crvit", video(0), video(1), "--csv", str(csv_file), "--top", "2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == video(0)
    assert lines[1].split()[:4] == ["0.00", "to", "0.38", "s"]  # 3 frames of 8 a second
    assert lines[2].split()[:4] == ["0.38", "to", "0.75", "s"]
    assert lines[1].count(" then ") == 2  # the names of two classes
    assert lines[3] == str(tmp_path / "classify-000000.png")
    assert Path(lines[3]).stat().st_size > 1000
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    assert [row["video"] for row in rows] == [video(0)] * 2 + [video(1)] * 2
    for row in rows:
        assert sum(float(row[name]) for name in row if " then " in name) == pytest.approx(1, abs=1e-5)


def test_classify_refuses_what_it_cannot_read(capsys, tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    run = "runs/motions-crvit"
    assert "text.mp4 is unreadable" in failure(capsys, "classify", run, str(tmp_path / "text.mp4"))
    assert "missing.mp4" in failure(capsys, "classify", run, str(tmp_path / "missing.mp4"))
    said = failure(capsys, "classify", run, video(0), "--rate", "0")
    assert "--rate is 0.0; expected a finite number above 0" in said
    assert "--top is 0; expected at least 1" in failure(capsys, "classify", run, video(0), "--top", "0")
    assert "expected files with different names" in failure(capsys, "classify", run, video(0), video(0))
    assert "expected the folder of a run" in failure(capsys, "classify", str(tmp_path), video(0))
    other = "patch_size is 5; expected a divisor of image_size = 16"
    assert other in failure(capsys, "classify", run, video(0), "--model.patch_size", "5")


def test_classify_goes_on_after_a_bad_video_and_names_it_at_the_end(capsys, tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    table = tmp_path / "said.csv"
    bad, missing = str(tmp_path / "text.mp4"), str(tmp_path / "missing.mp4")
    words = ["classify", "runs/motions-crvit", bad, video(0), missing, video(1), "--csv", str(table)]
    assert main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("recurra classify: 2 of 4 videos could not be read to the end:\n")
    assert [Path(bad).name in line for line in said.err.splitlines()[1:]] == [True, False]
    assert "missing.mp4" in said.err.splitlines()[2]
    assert said.out.splitlines().count(str(tmp_path / "classify-000001.png")) == 1
    assert [row["video"] for row in csv.DictReader(table.read_text().splitlines())] == [video(0)] * 2 + [video(1)] * 2
    assert main(["classify", "runs/motions-crvit", bad, missing, "--csv", str(table), "--out", str(tmp_path)]) == 2
    assert len(table.read_text().splitlines()) == 5, "a table of nothing replaces none"
