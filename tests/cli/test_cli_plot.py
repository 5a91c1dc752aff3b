"""`recurra plot`: figures of runs."""

import json
from pathlib import Path

import pytest

from recurra.cli import main

TEXT_RECIPE = """
experiment: text
data: {path: REPLACED, batch_size: 2, eval_batch_size: 1, segment_length: 4}
model:
  n_layer: 1
  d_model: 8
  mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}
  tie_embeddings: true
training: {epochs: 2, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""


def test_plot_draws_every_figure_as_png_and_svg(capsys, trained):
    assert main(["plot", trained]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves", "accuracy-by-span"}
    assert {path.name for path in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.stat().st_size > 1000 and path.parent == Path(trained) / "figures" for path in files)


@pytest.mark.usefixtures("unrendered_figures")
def test_a_text_run_is_trained_scored_and_drawn(capsys, tmp_path):
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    for split, n_lines in (("train", 12), ("valid", 3), ("test", 4)):
        (corpus / f"{split}.txt").write_text(" the cat sat on a mat \n" * n_lines)
    recipe = tmp_path / "text.yaml"
    recipe.write_text(TEXT_RECIPE)
    assert main(["train", str(recipe), "--run", str(run), "--data.path", str(corpus)]) == 0
    assert main(["eval", str(run)]) == 0
    scores = json.loads((run / "eval-test.json").read_text())
    assert scores["n_targets"] == 4 * 7 - 1
    assert scores["perplexity"] < 8
    capsys.readouterr()
    assert main(["plot", str(run)]) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert names == {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves"}
