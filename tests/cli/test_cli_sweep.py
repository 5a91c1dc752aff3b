"""`recurra sweep`: what is tried, in which folders, and what a second call does."""

import csv
import io
import json

import pytest

from recurra.cli import main, sweep
from recurra.train.metrics import read_metrics
from recurra.train.recipe import load_recipe
from recurra.train.run import start_run


@pytest.fixture
def words(tmp_path, text_recipe):
    """A sweep over two seeds."""
    return ["sweep", str(text_recipe), "--out", str(tmp_path / "out"), "--training.seed", "0,1"]


def test_values_with_commas_are_varied():
    given = ["--a.b=1,2", "--c.d", "x,y", "--e.f", "[1, 2]", "--g.h={k: 1, l: 2}", "--i.j", "3"]
    assert sweep._space(given) == (
        {"a.b": ["1", "2"], "c.d": ["x", "y"]},
        {"e.f": "[1, 2]", "g.h": "{k: 1, l: 2}", "i.j": "3"},
    )


def test_each_run_has_a_folder_and_a_second_call_trains_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    words += ["--training.log_every", "1", "--optimizer.learning_rate", "0.001,1e30"]
    assert main(words) == 0
    names = [f"seed={seed},learning_rate={rate}" for seed in (0, 1) for rate in ("0.001", "1e30")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    rows = read_metrics(tmp_path / "out" / names[0] / "log.jsonl")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([1e-3, 5e-4])
    assert capsys.readouterr().out.count("diverged") == 2
    fitted, fit = [], sweep.Trainer.fit
    monkeypatch.setattr(
        sweep.Trainer, "fit", lambda trainer, *more: fitted.append(trainer.folder.path.name) or fit(trainer, *more)
    )
    assert main([*words, "--csv"]) == 0
    assert fitted == names[1::2]  # those that diverged have no checkpoint, and begin again
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [row["run"] for row in rows[2:]] == [str(tmp_path / "out" / name) for name in names[1::2]]
    assert sorted(row["training.seed"] for row in rows[:2]) == ["0", "1"]
    assert [bool(row["loss"]) for row in rows] == [True, True, False, False]


def test_a_run_that_another_process_trains_keeps_its_recipe(words, text_recipe, tmp_path):
    first = start_run(text_recipe, tmp_path / "out" / "seed=0", ["--training.seed=0"])
    with pytest.raises(BlockingIOError):
        main([*words, "--debug"])
    assert first.folder.config.exists()
    first.fit()
    assert main(words) == 0


def test_a_run_that_was_killed_after_its_last_checkpoint_gets_its_summary(words, tmp_path):
    assert main(words) == 0
    summaries = [tmp_path / "out" / f"seed={seed}" / "summary.json" for seed in (0, 1)]
    summaries[0].write_text(summaries[0].read_text().replace('"finished": true', '"finished": false'))
    summaries[1].unlink()
    assert main(words) == 0
    assert all(json.loads(path.read_text())["finished"] for path in summaries)


def test_a_recipe_that_became_longer_trains_its_runs_on(words, text_recipe, tmp_path):
    assert main(words) == 0
    text_recipe.write_text(text_recipe.read_text().replace("max_steps: 2", "patience: 7, max_steps: 3, log_every: 1"))
    assert main(words) == 0
    for run in (tmp_path / "out").iterdir():
        assert read_metrics(run / "log.jsonl")[-1]["step"] == 3
        length = load_recipe(run / "config.yaml").training
        assert (length.epochs, length.max_steps, length.patience) == (9, 3, 7)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--optimizer.learning_rate", "0.5"], "optimizer.learning_rate (was "),
        (["--training.seed", "3", "--data.seed", "0,1"], "training.seed (was 0, now 3)"),  # a key of the same name
        (["--data.path", "OTHER"], "which this run was trained on; or choose a different folder for the runs"),
    ],
    ids=["another setting", "another key of the same name", "another corpus"],
)
def test_runs_of_other_settings_are_not_taken_for_those_of_a_sweep(words, text_recipe, tmp_path, capsys, more, said):
    (tmp_path / "other").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "other" / f"{split}.txt").write_text((tmp_path / f"{split}.txt").read_text())
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, *(word.replace("OTHER", str(tmp_path / "other")) for word in more)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
