import textwrap
from pathlib import Path

import pytest

from recurra.train.recipe import RecipeError, _read_recipe, load_recipe, read_family, recipe_help

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
    assert _read_recipe(f"{path}#plain-one")["model"] == {"d_model": 12, "n_heads": 2, "n_layer": 1, "mem_len": 0}
    assert _read_recipe(f"{path}#plain-one")["training"] == {"epochs": 3}


def test_a_variant_is_loaded_like_any_recipe(family):
    word = f"{family()}#crt-two"
    experiment = load_recipe(word, ["--training.epochs", "9"])
    assert experiment.experiment == "text-crt"
    assert (experiment.model.n_layer, experiment.model.d_model, experiment.training.epochs) == (2, 16, 9)
    assert "--model.d_model D_MODEL" in recipe_help(word)
    assert "(type: int, default: 16)" in recipe_help(word)


def test_an_unknown_variant_is_refused_with_the_nearest_names(family):
    with pytest.raises(RecipeError, match=r"is 'crt-tow'; expected one of plain-one, .*: did you mean crt-two"):
        _read_recipe(f"{family()}#crt-tow")
    with pytest.raises(RecipeError, match=r"expected one of plain-one, plain-two, crt-one, crt-two$"):
        _read_recipe(f"{family()}#zzz")


def test_a_family_without_a_variant_and_a_recipe_with_one_are_refused(family):
    with pytest.raises(
        RecipeError,
        match=r"a family of 4 recipes; expected .*#plain-one: there are plain-one, plain-two",
    ):
        _read_recipe(family())
    one = family("experiment: text\n", "one.yaml")
    with pytest.raises(RecipeError, match=r"one\.yaml without #row: the file is one recipe and has no variants"):
        _read_recipe(f"{one}#row")
    with pytest.raises(RecipeError, match="one recipe without axes; expected a recipe family"):
        read_family(one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {}\n", "axes is .*; expected the choices"),
        ("axes: {model: [a, b]}\n", "axes is .*; expected the choices"),
        ("axes: {model: {a: 3}}\n", "axes is .*; expected the choices"),
        ("axes: {model: {3: {}}}\n", "the key 3 is an int, not a string"),
        ("axes: {model: {a: {}}}\ncommon: 3\n", "common is 3; expected the keys"),
        ("axes: {model: {a: {}}}\nmodel: {}\n", "model is an unknown key; expected only common, axes"),
    ],
)
def test_what_is_no_family_is_refused(family, text, message):
    with pytest.raises(RecipeError, match=message):
        read_family(family(text))
