"""Recipes: files, overrides, families of variants, and how both are found."""

import textwrap
from pathlib import Path

import pytest
import yaml

from recurra._choices import recipes_folder
from recurra.data.memory_horizon import MemoryHorizonConfig
from recurra.train.experiment import Experiment
from recurra.train.recipe import (
    RecipeError,
    _read_recipe,
    find_recipe,
    load_recipe,
    read_family,
    recipe_help,
    to_yaml,
)
from recurra.train.run import default_run_folder

RECIPE = """
experiment: memory-horizon
data:
  n_samples: 50
model:
  mixer_options: {n_heads: 64, transition: fixed}
optimizer:
  learning_rate: 0.0025
  betas: [0.8, 0.9]
training:
  epochs: 3
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text: str = RECIPE):
        path = tmp_path / "recipe [1].yaml"  # brackets mean something to glob
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_recipe_sets_what_it_names_and_leaves_the_rest(recipe):
    experiment = load_recipe(recipe())
    assert type(experiment) is Experiment
    assert type(experiment.data) is MemoryHorizonConfig
    assert (experiment.data.n_samples, experiment.data.sequence_length) == (50, 1024)
    assert experiment.optimizer.betas == (0.8, 0.9)
    assert (experiment.training.epochs, experiment.training.seed) == (3, 0)
    assert experiment.model.mixer_options == {"n_heads": 64, "transition": "fixed"}


def test_overrides_win_over_the_recipe_and_the_last_one_over_the_others(recipe):
    words = ["--training.epochs", "7", "--optimizer.betas=[0.1, 0.2]", "--training.epochs=9"]
    words += ["--model.mixer_options.transition", "data", "--training.max_steps", "4"]
    experiment = load_recipe(recipe(), words)
    assert experiment.training.epochs == 9
    assert experiment.optimizer.betas == (0.1, 0.2)
    assert experiment.model.mixer_options == {"n_heads": 64, "transition": "data"}
    stacked = ["--model.mixer", "[a, b]", "--model.n_layer=2"]
    assert load_recipe(recipe("experiment: memory-horizon\n"), stacked).model.mixer == ["a", "b"]
    assert load_recipe(recipe(), ["--training.max_steps", "null"]).training.max_steps is None
    of_nothing = recipe("{experiment: memory-horizon, training: {epochs: null}}")
    assert load_recipe(of_nothing, ["--training.epochs=9"]).training.epochs == 9


def test_entries_inside_of_entries_are_values(recipe):
    words = ["--model.mixer_options.ring.r_min", "0.8", "--training.epochs=7", "--model.mixer_options.ring.max_phase=2"]
    experiment = load_recipe(recipe(), words)
    ring = {"r_min": 0.8, "max_phase": 2}
    assert experiment.model.mixer_options == {"n_heads": 64, "transition": "fixed", "ring": ring}
    assert experiment.training.epochs == 7
    for shallow in ("--model.mixer_options.ring", "--model.mixer_options"):
        words = [shallow, "{r_min: 0.9, max_phase: 1}", "--model.mixer_options.ring.r_min=0.5"]
        with pytest.raises(RecipeError, match=rf"ring.r_min is 'after {shallow}'; expected inside of the value of"):
            load_recipe(recipe(), words)
    with pytest.raises(RecipeError, match=r"transition is 'fixed'; expected keys and values"):
        load_recipe(recipe(), ["--model.mixer_options.transition.r_min", "0.8"])
    with pytest.raises(RecipeError, match=r"ring\.r_min is the last word; expected a value after it"):
        load_recipe(recipe(), ["--model.mixer_options.ring.r_min"])


def test_the_complete_experiment_is_a_recipe_for_itself(recipe, tmp_path):
    experiment = load_recipe(recipe(), ["--optimizer.gradient_clip", "1e-3"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(experiment))
    assert load_recipe(path) == experiment
    assert list(yaml.safe_load(path.read_text()))[:4] == ["experiment", "data", "model", "init_from"]


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("training: {epoch: 3}", "training.epoch", "training.epochs"),
        ("optimiser: {learning_rate: 3}", "optimiser.learning_rate", "optimizer.learning_rate"),
        ("nonsense: 3", "nonsense", "data, experiment, init_from, lora, model"),
        ("training: {epochs: 0}", "training.epochs", "expected at least 1"),
        ("training: {precision: half}", "training.precision", "is half; expected one of ['32-true', "),
        ("model: {d_model: wide}", "model.d_model", "is wide; expected a whole number"),
        ("optimizer: {betas: 3}", "optimizer.betas", "is 3; expected a list, as in [1, 2] or null"),
        ("training: {epochs: null}", "training.epochs", "is null; expected a whole number"),
        ("model: {mixer: null}", "model.mixer", "is null; expected a value: omit it for the default"),
        ("optimizer: {parameter_learning_rates: null}", "parameter_learning_rates", "is null; expected {key: value}"),
        ("data: {n_samples: -1}", "n_samples", "at least 10"),
        ("schedule: 3", "schedule", "a section with keys and values"),
    ],
)
def test_unknown_keys_and_impossible_values_are_refused_by_name(recipe, text, key, hint):
    path = recipe(f"experiment: memory-horizon\n{text}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert key in message
    assert hint in message


def test_the_help_shows_each_field_with_its_docstring_and_the_recipes_value(recipe):
    text = " ".join(recipe_help(recipe()).split())
    assert "--training.epochs EPOCHS Passes over the training data. (type: int, default: 3)" in text
    assert "--data.n_samples N_SAMPLES Sequences in total:" in text
    assert "--training.monitor {loss,accuracy} The validation score" in text


def test_a_misspelt_experiment_is_refused_with_a_near_one(recipe):
    with pytest.raises(RecipeError, match=r"experiment is 'memory-horizont'; .*: did you mean memory-horizon\?$"):
        load_recipe(recipe("experiment: memory-horizont\n"))


# --- families ---

FAMILY = """
common:
  data: {path: here, segment_length: 9}
  model: {d_model: 12, n_heads: 2}
  training: {epochs: 3}
axes:
  model:
    plain: {experiment: text-transformer-xl, model: {mem_len: 0}}
    crt: {experiment: text-crt, training: {epochs: 4}}
  layers:
    one: {model: {n_layer: 1}}
    two: {model: {n_layer: 2, d_model: 16}}
"""


@pytest.fixture
def family(tmp_path):
    def write(text: str = FAMILY, name: str = "family.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_variant_joins_its_choices_the_later_ones_winning(family):
    path = family()
    assert list(read_family(path).variants) == ["plain-one", "plain-two", "crt-one", "crt-two"]
    assert _read_recipe(f"{path}#crt-two") == {
        "experiment": "text-crt",
        "data": {"path": "here", "segment_length": 9},
        "model": {"d_model": 16, "n_heads": 2, "n_layer": 2},
        "training": {"epochs": 4},
    }
    assert _read_recipe(f"{path}#plain-one")["training"] == {"epochs": 3}
    experiment = load_recipe(f"{path}#crt-two", ["--training.epochs", "9"])
    assert (experiment.model.n_layer, experiment.model.d_model, experiment.training.epochs) == (2, 16, 9)


def test_words_that_name_no_variant_are_refused(family):
    with pytest.raises(RecipeError, match=r"is 'crt-tow'; expected one of plain-one, .*: did you mean crt-two"):
        _read_recipe(f"{family()}#crt-tow")
    for word in ("ptb/three-layers", "ptb/three-layers#nothing"):
        with pytest.raises(RecipeError, match=r"(^recipe|^the variant of) (is )?ptb/three-layers(,| is)"):
            load_recipe(word)
    with pytest.raises(RecipeError, match=r"a family of 4 recipes; expected .*#plain-one: there are plain-one, plain"):
        _read_recipe(family())
    one = family("experiment: text\n", "one.yaml")
    with pytest.raises(RecipeError, match=r"one\.yaml without #row: the file is one recipe and has no variants"):
        _read_recipe(f"{one}#row")
    with pytest.raises(RecipeError, match="one recipe without axes; expected a recipe family"):
        read_family(one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {model: {a: 3}}\n", "axes is .*; expected the choices"),
        ("axes: {model: {a: {}}}\ncommon: 3\n", "common is 3; expected the keys"),
        ("axes: {model: {a: {}}}\nmodel: {}\n", "model is an unknown key; expected only common, axes"),
    ],
)
def test_what_is_no_family_is_refused(family, text, message):
    with pytest.raises(RecipeError, match=message):
        read_family(family(text))


# --- names ---


@pytest.mark.parametrize("word", ["demo/fixed", "recipes/demo/fixed.yaml"])
def test_a_name_is_found_from_any_folder(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(word) == recipes_folder() / "demo" / "fixed.yaml"
    assert load_recipe(word).model.mixer_options["transition"] == "fixed"


def test_a_folder_with_one_recipe_is_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    assert find_recipe("text") == find_recipe("text/") == recipes_folder() / "text" / "gateloop.yaml"
    assert default_run_folder("text") == Path("runs", "text-gateloop")
    (tmp_path / "mine").touch()
    assert default_run_folder("mine") == Path("runs", f"{tmp_path.name}-mine")


def test_a_path_that_exists_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    own = tmp_path / "demo" / "fixed"
    own.write_text("experiment: memory-horizon\nmodel: {n_layer: 7}\n")
    assert load_recipe("demo/fixed").model.n_layer == 7


@pytest.mark.parametrize(
    ("word", "offer"),
    [
        ("memory-horizon", "did you mean memory-horizon/data-controlled or "),
        ("mqar", "did you mean recall/mqar?"),
        ("tex", "did you mean text?"),
        ("demo/fxed", "did you mean demo/fixed?"),
        ("zzz", "`recurra recipes` lists the names"),
    ],
)
def test_a_word_that_is_neither_is_refused_with_near_names(word, offer):
    with pytest.raises(RecipeError, match=f"recipe is {word}, which is neither") as caught:
        load_recipe(word)
    assert offer in str(caught.value)
