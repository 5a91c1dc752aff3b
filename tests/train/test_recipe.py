import textwrap

import pytest
import yaml

from recurra.data.memory_horizon import MemoryHorizonConfig
from recurra.train.experiment import Experiment
from recurra.train.recipe import RecipeError, load_recipe, recipe_help, to_yaml

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
    words += [
        "--model.mixer_options.transition",
        "data",
        "--training.max_steps",
        "4",
    ]
    experiment = load_recipe(recipe(), words)
    assert experiment.training.epochs == 9
    assert experiment.optimizer.betas == (0.1, 0.2)
    assert experiment.model.mixer_options == {"n_heads": 64, "transition": "data"}
    stacked = ["--model.mixer", "[a, b]", "--model.n_layer=2"]
    assert load_recipe(recipe("experiment: memory-horizon\n"), stacked).model.mixer == ["a", "b"]
    assert load_recipe(recipe(), ["--training.max_steps", "null"]).training.max_steps is None


def test_entries_inside_of_entries_are_values(recipe):
    experiment = load_recipe(
        recipe(),
        ["--model.mixer_options.ring.r_min", "0.8", "--training.epochs=7", "--model.mixer_options.ring.max_phase=2"],
    )
    assert experiment.model.mixer_options == {
        "n_heads": 64,
        "transition": "fixed",
        "ring": {"r_min": 0.8, "max_phase": 2},
    }
    assert experiment.training.epochs == 7
    assert load_recipe(recipe()).model.mixer_options == {"n_heads": 64, "transition": "fixed"}
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
    assert list(yaml.safe_load(path.read_text())) == [
        "experiment",
        "data",
        "model",
        "init_from",
        "optimizer",
        "schedule",
        "averaging",
        "training",
    ]


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("training: {epoch: 3}", "training.epoch", "training.epochs"),
        ("training: {epochs: {x: 3}}", "training.epochs", ""),
        ("optimiser: {learning_rate: 3}", "optimiser.learning_rate", "optimizer.learning_rate"),
        ("nonsense: 3", "nonsense", "data, experiment, init_from, model"),
        ("data: {path: here}", "data.path", "data.batch_size"),
        ("training: {epochs: many}", "training.epochs", "int"),
        ("training: {epochs: 0}", "training.epochs", "expected at least 1"),
        ("training: {precision: half}", "training.precision", "32-true"),
        ("data: {n_samples: -1}", "n_samples", "at least 10"),
        ("data: {n_samples: 1.5}", "n_samples", "int"),
        ("model: {dropout: 2}", "dropout", r"in [0, 1)"),
        ("optimizer: {betas: [0.1]}", "optimizer.betas", ""),
        ("schedule: 3", "schedule", "a section with keys and values"),
        ("data: null", "data", "a section with keys and values"),
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data: {}", "experiment is None; expected one of induction, memory-horizon"),
        ("experiment: vision", "experiment is 'vision'; expected one of induction, memory-horizon"),
        ("- a\n- b", "a list; expected keys and values in YAML"),
        ("", "None; expected keys and values in YAML"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, text, reason):
    with pytest.raises(RecipeError, match=reason):
        load_recipe(recipe(text))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe is .*nowhere\.yaml, which is neither a file nor the name"):
        load_recipe(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_the_help_shows_each_field_with_its_docstring_and_the_recipes_value(recipe):
    text = " ".join(recipe_help(recipe()).split())
    assert "--training.epochs EPOCHS Passes over the training data. (type: int, default: 3)" in text
    assert "--data.n_samples N_SAMPLES Sequences in total:" in text
    assert "--training.monitor {loss,accuracy} The validation score" in text
