"""A recipe is found by its path, or by its name wherever the process stands."""

import pytest

from recurra.train import recipe as recipe_files
from recurra.train.recipe import RecipeError, find_recipe, load_recipe, read_family, recipe_names, recipes_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder that is not the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("word", ["demo/fixed", "demo/fixed.yaml", "recipes/demo/fixed.yaml"])
def test_a_name_is_found_from_any_folder(word):
    assert find_recipe(word) == recipes_folder() / "demo" / "fixed.yaml"
    assert load_recipe(word).model.mixer_options["transition"] == "fixed"


def test_a_variant_of_a_named_family_is_found():
    family = read_family("ptb/transformers")
    assert "crt-gru-3-layers-n35" in family.variants
    assert load_recipe("ptb/transformers#crt-gru-3-layers-n35").data.segment_length == 35


def test_a_path_that_exists_wins_over_a_name(elsewhere):
    (elsewhere / "demo").mkdir()
    own = elsewhere / "demo" / "fixed"
    own.write_text("experiment: memory-horizon\nmodel: {n_layer: 7}\n")
    assert load_recipe("demo/fixed").model.n_layer == 7


def test_a_folder_does_not_hide_a_name(elsewhere):
    (elsewhere / "demo" / "fixed").mkdir(parents=True)
    assert find_recipe("demo/fixed").is_file()


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


def test_an_incomplete_installation_says_so(monkeypatch, elsewhere):
    monkeypatch.setattr(recipe_files, "_IN_WHEEL", elsewhere / "none")
    monkeypatch.setattr(recipe_files, "_IN_CLONE", elsewhere / "none")
    with pytest.raises(FileNotFoundError, match="reinstall Recurra"):
        recipe_names()
