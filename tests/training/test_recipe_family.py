import textwrap
from pathlib import Path

import pytest

from recurra.training import RecipeError, load_recipe, read_family, recipe_help, split_row
from recurra.training.recipe_family import read_recipe

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
published:
  crt-two: {test_perplexity: 61.0, tables: [9]}
"""


@pytest.fixture
def family(tmp_path):
    def write(text: str = FAMILY, name: str = "family.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_row_joins_its_choices_the_later_ones_winning(family):
    path = family()
    assert list(read_family(path).rows) == ["plain-one", "plain-two", "crt-one", "crt-two"]
    assert read_recipe(f"{path}#crt-two") == {
        "experiment": "text-crt",
        "data": {"path": "here", "segment_length": 9},
        "model": {"d_model": 16, "n_heads": 2, "n_layer": 2},
        "training": {"epochs": 4},
    }
    assert read_recipe(f"{path}#plain-one")["model"] == {"d_model": 12, "n_heads": 2, "n_layer": 1, "mem_len": 0}
    assert read_recipe(f"{path}#plain-one")["training"] == {"epochs": 3}
    assert read_family(path).published == {"crt-two": {"test_perplexity": 61.0, "tables": [9]}}


def test_rows_do_not_share_what_they_set(family):
    rows = read_family(family()).rows
    rows["plain-one"]["model"]["d_model"] = 99
    assert rows["crt-one"]["model"]["d_model"] == 12


def test_a_row_is_loaded_like_any_recipe(family):
    word = f"{family()}#crt-two"
    experiment = load_recipe(word, ["--training.epochs", "9"])
    assert experiment.experiment == "text-crt"
    assert (experiment.model.n_layer, experiment.model.d_model, experiment.training.epochs) == (2, 16, 9)
    assert "--model.d_model D_MODEL" in recipe_help(word)
    assert "(type: int, default: 16)" in recipe_help(word)


def test_an_error_names_file_row_and_key(family):
    word = f"{family(FAMILY.replace('n_heads', 'heads'))}#crt-two"
    with pytest.raises(RecipeError, match=r"family\.yaml#crt-two: unknown key model\.heads"):
        load_recipe(word)


def test_an_unknown_row_is_refused_with_those_that_are_near(family):
    with pytest.raises(RecipeError, match=r"has no row 'crt-tow'; did you mean crt-two"):
        read_recipe(f"{family()}#crt-tow")
    with pytest.raises(RecipeError, match="there are: plain-one, plain-two, crt-one, crt-two"):
        read_recipe(f"{family()}#zzz")


def test_a_family_without_a_row_and_a_recipe_with_one_are_refused(family):
    with pytest.raises(RecipeError, match=r"holds 4 recipes; name one as in .*family\.yaml#plain-one"):
        read_recipe(family())
    one = family("experiment: text\n", "one.yaml")
    with pytest.raises(RecipeError, match="is one recipe and has no rows; give it without #row"):
        read_recipe(f"{one}#row")
    with pytest.raises(RecipeError, match="not a family"):
        read_family(one)


def test_a_hash_in_a_files_own_name_is_no_row(family):
    path = family("experiment: text\n", "odd#name.yaml")
    assert split_row(path) == (path, None)
    assert read_recipe(path) == {"experiment": "text"}
    assert split_row("a/b.yaml") == (Path("a/b.yaml"), None)
    assert split_row("a/b.yaml#c") == (Path("a/b.yaml"), "c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {}\n", "axes must hold"),
        ("axes: {model: [a, b]}\n", "axes must hold"),
        ("axes: {model: {a: 3}}\n", "axes must hold"),
        ("axes: {model: {3: {}}}\n", "axes must hold"),
        ("axes: {model: {a: {}}}\ncommon: 3\n", "common must hold"),
        ("axes: {model: {a: {}}}\npublished: {a: 3}\n", "published the figures of each row"),
        ("axes: {model: {a: {}}}\npublished: {b: {}}\n", "published names 'b', which is no row; there are: a"),
        ("axes: {model: {a: {}}}\nmodel: {}\n", "unknown key model; a family has: common, axes, published"),
    ],
)
def test_what_is_no_family_is_refused(family, text, message):
    with pytest.raises(RecipeError, match=message):
        read_family(family(text))
