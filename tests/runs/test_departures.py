"""What a table says of a run that is not its recipe's."""

import json

import pytest
import yaml

from recurra.runs.departures import departures
from recurra.training import RunFolder, load_recipe, to_yaml

RECIPE = {
    "experiment": "text",
    "data": {"path": "corpus", "segment_length": 4},
    "model": {"n_layer": 1, "d_model": 8},
    "training": {"epochs": 3},
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


def run_of(tmp_path, recipe, *overrides, finished=True) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.write_config(to_yaml(load_recipe(recipe, overrides)))
    folder.summary.write_text(json.dumps({"finished": finished, "steps": 7}))
    return folder


def test_places_reports_and_random_numbers_are_no_departure(tmp_path, recipe):
    words = ["--data.path", "elsewhere", "--training.seed", "3", "--training.threads", "1", "--training.log_every", "9"]
    assert departures(run_of(tmp_path, recipe, *words), recipe) == []
    assert departures(run_of(tmp_path, recipe), recipe) == []


def test_sizes_and_lengths_are(tmp_path, recipe):
    words = ["--model.d_model", "40", "--training.max_steps", "20"]
    assert departures(run_of(tmp_path, recipe, *words, finished=False), recipe) == [
        "model.d_model 40, not 8",
        "training.max_steps 20, not null",
        "unfinished, at step 7",
    ]


def test_what_can_end_a_run_early_is(tmp_path, recipe):
    run = run_of(tmp_path, recipe, "--training.patience", "3")
    assert departures(run, recipe) == ["training.patience 3, not null"]


def test_the_size_of_a_vocabulary_is_unless_it_is_of_a_tokenizer_file(tmp_path, recipe):
    words = ["--data.vocabulary", "bpe", "--data.bpe_vocab_size"]
    (tmp_path / "bpe.yaml").write_text(to_yaml(load_recipe(recipe, [*words, "600"])))
    run = run_of(tmp_path, recipe, *words, "300")
    assert departures(run, str(tmp_path / "bpe.yaml")) == ["data.bpe_vocab_size 300, not 600"]
    run = run_of(tmp_path, recipe, "--data.vocabulary", "bpe", "--data.tokenizer", "tokenizer.json")
    assert departures(run, str(tmp_path / "bpe.yaml")) == []


def test_what_a_recipe_leaves_to_the_machine_is_no_departure(tmp_path, recipe):
    run = run_of(tmp_path, recipe, "--training.precision", "bf16-mixed")
    assert departures(run, recipe) == ["training.precision bf16-mixed, not 32-true"]
    (tmp_path / "auto.yaml").write_text(yaml.safe_dump({**RECIPE, "training": {"epochs": 3, "precision": "auto"}}))
    assert departures(run, str(tmp_path / "auto.yaml")) == []
