"""`recurra cost` from outside."""

import json
from pathlib import Path

import pytest
import torch

from recurra.analysis import measured_cost
from recurra.cli import main
from recurra.models import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    TransformerXL,
    TransformerXLConfig,
)

MODEL = {"n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 6}
COMMON = f"""
data: {{path: nowhere, segment_length: 5, batch_size: 2}}
model: {json.dumps(MODEL)}
training: {{epochs: 1, log_every: 5, tensorboard: false, accelerator: cpu, threads: 1}}
"""
TRANSFORMER_XL = "experiment: text-transformer-xl" + COMMON
CRT = "experiment: text-crt" + COMMON
FAMILY = f"""
common: {{experiment: text-crt, data: {{path: nowhere, segment_length: 5}}, model: {json.dumps(MODEL)}}}
axes:
  model: {{crt-gru: {{}}, crt-ncgru: {{model: {{memory: ncgru, position: rnn-ncgru}}}}}}
"""
HORIZON = """
experiment: memory-horizon
data: {n_samples: 20, sequence_length: 9, batch_size: 2, resets_per_sample: 2, modulus: 7}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 16}
"""


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def costs(tmp_path: Path, *words: str) -> list[dict]:
    assert main(["cost", *words, "--json", str(tmp_path / "out" / "costs.json")]) == 0
    return json.loads((tmp_path / "out" / "costs.json").read_text())


def failure(capsys, *words: str) -> str:
    assert main(["cost", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("recurra cost: ")
    return message


@pytest.fixture
def corpus(tmp_path) -> Path:
    for split, n_lines in (("train", 20), ("valid", 3), ("test", 4)):
        written(tmp_path / "corpus" / f"{split}.txt", " the cat sat on a mat \n" * n_lines)
    return tmp_path / "corpus"


N_WORDS = 6 + 2
"""Those of the corpus, <eos> and <unk>."""


def test_numbers_are_those_of_the_recipes_models(tmp_path, capsys):
    recipes = [written(tmp_path / "xl.yaml", TRANSFORMER_XL), written(tmp_path / "crt.yaml", CRT)]
    rows = costs(tmp_path, *recipes, "--vocabulary", "23")
    sizes = {**MODEL, "vocab_size": 23, "segment_length": 5}
    models = [
        TransformerXL(TransformerXLConfig(**sizes)),
        CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**sizes)),
    ]
    for row, recipe, kind, model in zip(rows, recipes, ("Transformer-XL", "CRT-GRU"), models):
        assert (row["name"], row["kind"], row["n_layer"], row["segment_length"]) == (recipe, kind, 2, 5)
        assert row["measured"] == measured_cost(model, 5)._asdict()
    published = 2 * (28 * 5 * 64 + 12 * 25 * 8 + 6 * 25)
    assert rows[0]["published"] == {"flops": published, "parameters": 2 * (640 + 48)}
    text = capsys.readouterr().out
    assert all(recipe in text for recipe in recipes)
    assert f"{rows[0]['measured']['block_flops'] / published:.3f}" in text
    assert f" {rows[1]['measured']['state_bytes']} " in text
    assert "multiply-adds" in text


def test_rows_of_a_family_are_called_as_they_were_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the table has room for short names
    written(tmp_path / "family.yaml", FAMILY)
    words = ["family.yaml#crt-ncgru", "family.yaml#crt-gru"]
    rows = costs(tmp_path, *words, "--vocabulary", "23")
    assert [(row["name"], row["kind"]) for row in rows] == [(words[0], "CRT-NCGRU"), (words[1], "CRT-GRU")]
    assert words[0] in capsys.readouterr().out


def test_values_are_set_over_every_recipe(tmp_path):
    recipes = [written(tmp_path / "xl.yaml", TRANSFORMER_XL), written(tmp_path / "crt.yaml", CRT)]
    rows = costs(tmp_path, "--model.n_layer", "3", *recipes, "--data.segment_length=7", "--vocabulary", "23")
    assert [(row["n_layer"], row["segment_length"]) for row in rows] == [(3, 7), (3, 7)]


def test_the_vocabulary_is_the_corpuss_where_none_is_stated(tmp_path, corpus):
    recipe = written(tmp_path / "crt.yaml", CRT)
    (row,) = costs(tmp_path, recipe, "--data.path", str(corpus))
    assert row["measured"]["vocabulary_flops"] == 2 * 5 * 8 * N_WORDS
    (row,) = costs(tmp_path, recipe, "--data.path", str(corpus), "--vocabulary", "100")
    assert row["measured"]["vocabulary_flops"] == 2 * 5 * 8 * 100


def test_no_weight_is_allocated(tmp_path):
    (row,) = costs(tmp_path, written(tmp_path / "crt.yaml", CRT), "--vocabulary", str(10**12))
    assert row["measured"]["parameters"] > 8 * 10**12


def test_a_model_without_a_formula_is_counted_alone(tmp_path, capsys):
    (row,) = costs(tmp_path, written(tmp_path / "horizon.yaml", HORIZON))
    assert (row["kind"], row["segment_length"], row["published"]) == ("language model (gateloop)", 9, None)
    assert row["measured"]["vocabulary_flops"] == 2 * 9 * 8 * 7
    assert "language model (gateloop)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (CRT, [], "nowhere"),
        (CRT, [], "give the size of its vocabulary, as in --vocabulary 10000"),
        (CRT, ["--vocabulary", "0"], "--vocabulary is 0; expected at least 1"),
        (CRT, ["--vocabulary", "9", "--model.cutoffs", "[12]"], "cutoffs"),
        (
            CRT,
            ["--vocabulary", "9", "--plot", "figures"],
            "is not the folder of a run; expected",
        ),
        (
            HORIZON,
            ["--vocabulary", "9"],
            "is a recipe of memory-horizon; expected one over text",
        ),
        (HORIZON, ["--data.n_samples", "5"], "n_samples"),
    ],
)
def test_mistakes_are_explained(capsys, tmp_path, recipe, words, message):
    assert message in failure(capsys, written(tmp_path / "recipe.yaml", recipe), *words)


def test_a_folder_without_a_run_and_a_recipe_that_is_not_there(capsys, tmp_path):
    assert "expected the folder of a run" in failure(capsys, str(tmp_path))
    assert "expected the folder of a run" in failure(capsys, str(tmp_path), "--plot", "figures")
    assert "which cannot be read" in failure(capsys, str(tmp_path / "nothing.yaml"))


def test_nothing_is_drawn_or_written_unless_asked_for(tmp_path, monkeypatch):
    recipe = written(tmp_path / "recipe.yaml", CRT)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["cost", recipe, "--vocabulary", "9"]) == 0
    assert not list((tmp_path / "empty").iterdir())


# --- runs ---


def scored_run(folder: Path, recipe: str, perplexity: float, name: str = "eval-test.json") -> str:
    written(folder / "config.yaml", recipe)
    written(folder / name, json.dumps({"perplexity": perplexity}))
    return str(folder)


def test_a_trained_and_scored_run_is_drawn(tmp_path, corpus, capsys):
    run, threads = str(tmp_path / "run"), torch.get_num_threads()
    try:
        recipe = written(tmp_path / "crt.yaml", CRT)
        assert main(["train", recipe, "--run", run, "--data.path", str(corpus)]) == 0
        assert f"recurra eval {run}" in failure(capsys, run, "--plot", str(tmp_path / "figures"))
        assert main(["eval", run]) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = costs(tmp_path, run, "--plot", str(tmp_path / "figures"))
    assert (row["name"], row["kind"]) == (run, "CRT-GRU")
    assert row["measured"]["vocabulary_flops"] == 2 * 5 * 8 * N_WORDS
    files = capsys.readouterr().out.splitlines()[-2:]
    assert files == [str(tmp_path / "figures" / f"perplexity-over-flops.{kind}") for kind in ("png", "svg")]
    assert all(Path(file).stat().st_size > 1000 for file in files)


@pytest.fixture
def curves(monkeypatch) -> list[dict]:
    """What is asked to be drawn, instead of the figure."""
    seen: list[dict] = []
    monkeypatch.setattr("recurra.cli.cost.perplexity_over_flops", seen.append)
    monkeypatch.setattr("recurra.cli.cost.save", lambda figure, folder, name: [])
    return seen


def test_points_are_the_runs_blocks_and_perplexities(tmp_path, curves):
    runs = [
        scored_run(tmp_path / "a", CRT, 61.5),
        scored_run(tmp_path / "b", CRT.replace("segment_length: 5", "segment_length: 3"), 66.0),
        scored_run(tmp_path / "c", TRANSFORMER_XL, 70.0),
    ]
    rows = costs(tmp_path, *runs, "--vocabulary", "9", "--plot", str(tmp_path / "figures"))
    flops = [row["measured"]["block_flops"] for row in rows]
    assert curves == [{"CRT-GRU": [(5, flops[0], 61.5), (3, flops[1], 66.0)], "Transformer-XL": [(5, flops[2], 70.0)]}]


def test_depths_that_differ_have_curves_of_their_own(tmp_path, curves):
    deep = CRT.replace('"n_layer": 2', '"n_layer": 3')
    runs = [scored_run(tmp_path / "a", CRT, 61.5), scored_run(tmp_path / "b", deep, 60.0)]
    costs(tmp_path, *runs, "--vocabulary", "9", "--plot", str(tmp_path / "figures"))
    assert [list(names) for names in curves] == [["CRT-GRU, 2 layers", "CRT-GRU, 3 layers"]]


def test_a_run_scored_with_other_lengths_is_drawn_with_them(tmp_path, curves, capsys):
    run = scored_run(tmp_path / "a", CRT, 61.5)
    words = [run, "--data.segment_length", "4", "--vocabulary", "9", "--plot", str(tmp_path / "figures")]
    message = failure(capsys, *words)
    assert "eval-test-segment_length-4.json" in message
    assert f"recurra eval {run} --data.segment_length 4" in message
    scored_run(tmp_path / "a", CRT, 63.0, "eval-test-segment_length-4.json")
    assert main(["cost", *words, "--data.path", "moved"]) == 0
    (points,) = curves[-1].values()
    assert [(point.segment_length, point.perplexity) for point in points] == [(4, 63.0)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"perplexity": null}'])
def test_damaged_scores_are_refused(capsys, tmp_path, content):
    run = scored_run(tmp_path / "run", CRT, 1.0)
    written(tmp_path / "run" / "eval-test.json", content)
    message = failure(capsys, run, "--plot", str(tmp_path / "figures"), "--vocabulary", "9")
    assert f"score the run first:\n  recurra eval {run}" in message


def test_the_command_is_listed(capsys):
    assert main(["--help"]) == 0
    assert "  cost" in capsys.readouterr().out
