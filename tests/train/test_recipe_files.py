"""A recipe is found by its path, or by its name wherever the process stands."""

import pytest

from recurra.train.recipe import RecipeError, find_recipe, load_recipe, recipe_names, recipes_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder that is not the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("word", ["demo/fixed", "demo/fixed.yaml", "recipes/demo/fixed.yaml"])
def test_a_name_is_found_from_any_folder(word):
    assert find_recipe(word) == recipes_folder() / "demo" / "fixed.yaml"
    assert load_recipe(word).model.mixer_options["transition"] == "fixed"


def test_a_path_that_exists_wins_over_a_name(elsewhere):
    (elsewhere / "demo").mkdir()
    own = elsewhere / "demo" / "fixed"
    own.write_text("experiment: memory-horizon\nmodel: {n_layer: 7}\n")
    assert load_recipe("demo/fixed").model.n_layer == 7


def test_every_name_is_a_file_of_the_folder():
    names = recipe_names()
    assert names == sorted(names)
    assert {f"{name}.yaml" for name in names} == {
        path.relative_to(recipes_folder()).as_posix() for path in recipes_folder().rglob("*.yaml")
    }


@pytest.mark.parametrize(
    ("word", "offer"),
    [
        ("memory-horizon", "did you mean memory-horizon/data-controlled or "),
        ("mqar", "did you mean recall/mqar?"),
        ("ptb/gatelop", "did you mean ptb/gateloop?"),
        ("zzz", "`recurra recipes` lists the names"),
    ],
)
def test_a_word_that_is_neither_is_refused_with_near_names(word, offer):
    with pytest.raises(RecipeError, match=f"recipe is {word}, which is neither") as caught:
        load_recipe(word)
    assert offer in str(caught.value)
