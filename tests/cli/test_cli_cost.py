"""`recurra cost`: recipes and runs in, a table, numbers and a figure out."""

import json
from pathlib import Path

from tests.cli.conftest import failure
from tests.train.runs.test_cost import CRT, HORIZON, TRANSFORMER_XL, written

from recurra.cli import main


def test_the_table_has_a_row_for_each_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the table has room for short names
    words = [written(Path("xl.yaml"), TRANSFORMER_XL), written(Path("horizon.yaml"), HORIZON)]
    assert main(["cost", words[0], "--vocabulary", "23", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert main(["cost", words[0], "--vocabulary", "23"]) == 0
    text = capsys.readouterr().out
    assert words[0] in text
    assert f"{row['measured']['block_flops'] / row['published']['flops']:.3f}" in text
    assert f" {row['measured']['state_bytes']:,} " in text
    assert "multiply-adds" in text
    assert main(["cost", words[1]]) == 0
    assert "language model (gateloop)" in capsys.readouterr().out


def test_mistakes_are_explained(capsys, tmp_path):
    recipe = written(tmp_path / "recipe.yaml", CRT)
    assert "as in --vocabulary 10000" in failure(capsys, "cost", recipe)
    assert "--vocabulary is 0; expected at least 1" in failure(capsys, "cost", recipe, "--vocabulary", "0")
    message = failure(capsys, "cost", recipe, "--vocabulary", "9", "--plot", "figures")
    assert "expected the folder of a run that was scored" in message
    assert "expected the folder of a run" in failure(capsys, "cost", str(tmp_path))
    assert "which is neither a file nor the name of a recipe" in failure(capsys, "cost", str(tmp_path / "nothing.yaml"))


def test_a_trained_and_scored_run_is_drawn(tmp_path, capsys):
    run, figures = str(tmp_path / "run"), str(tmp_path / "figures")
    for split, n_lines in (("train", 20), ("valid", 3), ("test", 4)):
        written(tmp_path / "corpus" / f"{split}.txt", " the cat sat on a mat \n" * n_lines)
    recipe = written(tmp_path / "crt.yaml", CRT)
    assert main(["train", recipe, "--run-dir", run, "--data.path", str(tmp_path / "corpus")]) == 0
    capsys.readouterr()
    assert f"recurra eval {run}" in failure(capsys, "cost", run, "--plot", figures)
    assert main(["eval", run]) == 0
    assert main(["cost", run, "--plot", figures]) == 0
    files = capsys.readouterr().out.splitlines()[-2:]
    assert files == [f"{figures}/perplexity-over-flops.{kind}" for kind in ("png", "svg")]
    assert all(Path(file).stat().st_size > 1000 for file in files)
